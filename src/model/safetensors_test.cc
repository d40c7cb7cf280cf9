// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors.h"

#include <cstring>
#include <string>
#include <vector>

#include "model/model_test_faults.h"

namespace kascade {
namespace {

using testing::HasSubstr;

std::string file_of(const std::string& header, size_t data_bytes) {
  std::string file(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(file.data(), &length, 8);
  return file + header + std::string(data_bytes, '\0');
}

std::vector<StoredTensor> parse(const std::string& file) {
  return parse_safetensors({reinterpret_cast<const std::byte*>(file.data()), file.size()}, "F");
}

template <class E>
std::string fault(const std::string& header, size_t data_bytes) {
  return fault_of<E>([&] { parse(file_of(header, data_bytes)); });
}

TEST(Safetensors, ReadsTensorsInTheOrderOfTheirBytes) {
  const std::string file = file_of(R"({"__metadata__":{"format":"pt"},)"
                                   R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[6,30]},)"
                                   R"("b":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},)"
                                   R"("c":{"dtype":"F16","shape":[2],"data_offsets":[2,6]},)"
                                   R"("empty":{"dtype":"F16","shape":[0,7],"data_offsets":[6,6]}}   )",
                                   30);
  const std::vector<StoredTensor> tensors = parse(file);
  ASSERT_EQ(tensors.size(), 4u);
  EXPECT_EQ(tensors[0].name, "b");
  EXPECT_EQ(tensors[0].type, WeightType::kBF16);
  EXPECT_EQ(tensors[1].name, "c");
  EXPECT_EQ(tensors[2].name, "empty");
  EXPECT_EQ(tensors[3].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(static_cast<const char*>(tensors[3].data), file.data() + file.size() - 24);
}

TEST(Safetensors, HeaderLengthIsBoundedByTheFile) {
  EXPECT_THAT(fault_of<BadFile>([] { parse(""); }), HasSubstr("expected at least 8 bytes, got 0"));
  EXPECT_THAT(fault_of<BadFile>([] { parse(std::string(7, '\0')); }), HasSubstr("got 7"));
  EXPECT_THAT(fault_of<BadFile>([] { parse(std::string(8, '\0')); }),
              HasSubstr("header length: expected 2..0, got 0"));
  // The length does not count its own 8 bytes.
  std::string file = file_of("{}", 0);
  file[0] = 3;
  EXPECT_THAT(fault_of<BadFile>([&] { parse(file); }), HasSubstr("header length: expected 2..2, got 3"));
  file[0] = 10;
  EXPECT_THROW(parse(file), BadFile);
  for (int i = 0; i < 8; ++i) file[static_cast<size_t>(i)] = '\xFF';
  EXPECT_THAT(fault_of<BadFile>([&] { parse(file); }), HasSubstr("got 18446744073709551615"));
  EXPECT_THAT(fault_of<BadFile>([] { parse("version https://git-lfs.github.com/spec/v1"); }),
              HasSubstr("header length"));
}

TEST(Safetensors, HeaderMustBeOneJsonObject) {
  EXPECT_THAT(fault<BadFile>("[]", 0), HasSubstr("expected a JSON object, got '[]'"));
  EXPECT_THAT(fault<BadFile>("<html>", 0), HasSubstr("got '<html>'"));
  EXPECT_THAT(fault<BadFile>("{\"a\":", 0), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault<BadFile>("{} {}", 0), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault<BadFile>("{\"\xFF\":{}}", 0), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault<BadFile>(R"({"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},)"
                             R"("a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}})",
                             2),
              HasSubstr("duplicate key 'a'"));
  EXPECT_THAT(fault<BadFile>("{\"a\":" + std::string(100'000, '['), 0), HasSubstr("nested deeper"));
  EXPECT_THAT(fault<BadFile>(R"({"__metadata__":{"a":1}})", 0),
              HasSubstr("'__metadata__': expected an object of strings"));
  EXPECT_THAT(fault<BadFile>(R"({"__metadata__":[]})", 0), HasSubstr("'__metadata__'"));
}

TEST(Safetensors, TensorFaultsNameTensorAndField) {
  const struct {
    const char* entry;
    const char* expected;
  } kFaults[] = {
      {R"(1)", "expected an object, got number"},
      {R"({"shape":[4],"data_offsets":[0,8]})", "'dtype'"},
      {R"({"dtype":5,"shape":[4],"data_offsets":[0,8]})", "'dtype'"},
      {R"({"dtype":"F17","shape":[4],"data_offsets":[0,8]})",
       "'dtype': expected F32, F16 or BF16, got 'F17'"},
      {R"({"dtype":"F16","data_offsets":[0,8]})", "'shape'"},
      {R"({"dtype":"F16","shape":4,"data_offsets":[0,8]})", "'shape'"},
      {R"({"dtype":"F16","shape":[-4],"data_offsets":[0,8]})",
       "'shape': expected integers of at least 0, got '-4'"},
      {R"({"dtype":"F16","shape":[4.0],"data_offsets":[0,8]})", "'shape': expected integers"},
      {R"({"dtype":"F16","shape":["4"],"data_offsets":[0,8]})", "'shape': expected integers"},
      {R"({"dtype":"F16","shape":[18446744073709551615],"data_offsets":[0,8]})",
       "'shape': expected integers"},
      {R"({"dtype":"F16","shape":[4294967296,4294967296],"data_offsets":[0,8]})", "product"},
      {R"({"dtype":"F16","shape":[9223372036854775807,4],"data_offsets":[0,8]})", "product"},
      {R"({"dtype":"F16","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,8]})", "'shape'"},
      {R"({"dtype":"F16","shape":[4]})", "'data_offsets'"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[8]})", "'data_offsets': expected an array of two"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[0,8,9]})", "'data_offsets': expected an array of two"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[8,0]})",
       "'data_offsets': expected begin <= end <= 8, got '[8,0]'"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[-8,0]})", "'data_offsets': expected begin <= end <= 8"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[0.0,8.0]})", "'data_offsets': expected begin"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[0,9]})", "'data_offsets': expected begin <= end <= 8"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[0,18446744073709551615]})", "'data_offsets'"},
      {R"({"dtype":"F16","shape":[3],"data_offsets":[0,8]})", "expected 6 bytes for shape [3] of F16, got 8"},
      {R"({"dtype":"F32","shape":[4],"data_offsets":[0,8]})",
       "expected 16 bytes for shape [4] of F32, got 8"},
      {R"({"dtype":"F16","shape":[4],"data_offsets":[0,8],"x":0})", "field 'x': unknown"},
  };
  for (const auto& one : kFaults) {
    const std::string message = fault<BadFile>(std::string(R"({"t":)") + one.entry + "}", 8);
    EXPECT_THAT(message, HasSubstr("F: tensor 't': ")) << one.entry;
    EXPECT_THAT(message, HasSubstr(one.expected)) << one.entry;
  }
  for (const char* dtype : {"F64", "I8", "F8_E4M3", "BOOL"})
    EXPECT_THAT(fault<Unsupported>(
                    std::string(R"({"t":{"dtype":")") + dtype + R"(","shape":[8],"data_offsets":[0,8]}})", 8),
                HasSubstr("tensor 't': field 'dtype': expected F32, F16 or BF16, got " + std::string(dtype)));
}

std::string two_tensors(const char* first, const char* second) {
  return std::string(R"({"a":{"dtype":"F16","shape":[4],"data_offsets":)") + first +
         R"(},"b":{"dtype":"F16","shape":[4],"data_offsets":)" + second + "}}";
}

TEST(Safetensors, TensorsCoverTheDataExactly) {
  EXPECT_NO_THROW(parse(file_of(two_tensors("[8,16]", "[0,8]"), 16)));
  EXPECT_THAT(fault<BadFile>(two_tensors("[0,8]", "[4,12]"), 16),
              HasSubstr("'b': field 'data_offsets': expected to begin at 8"));
  EXPECT_THAT(fault<BadFile>(two_tensors("[0,8]", "[0,8]"), 16), HasSubstr("expected to begin at 8"));
  EXPECT_THAT(fault<BadFile>(two_tensors("[0,8]", "[10,18]"), 18), HasSubstr("expected to begin at 8"));
  EXPECT_THAT(fault<BadFile>(two_tensors("[2,10]", "[10,18]"), 18),
              HasSubstr("'a': field 'data_offsets': expected to begin at 0"));
  EXPECT_THAT(fault<BadFile>(two_tensors("[0,8]", "[8,16]"), 17),
              HasSubstr("end of the tensor data: expected 16, got 17"));
  EXPECT_THAT(fault<BadFile>("{}", 1), HasSubstr("expected 0, got 1"));
}

TEST(Safetensors, EveryTruncationIsAnError) {
  const std::string whole = file_of(two_tensors("[0,8]", "[8,16]"), 16);
  for (size_t size = 0; size < whole.size(); ++size)
    EXPECT_THROW(parse(whole.substr(0, size)), BadFile) << size;
}

}  // namespace
}  // namespace kascade
