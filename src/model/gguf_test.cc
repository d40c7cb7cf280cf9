// SPDX-License-Identifier: Apache-2.0
#include "model/gguf.h"

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "model/gguf_test_builder.h"
#include "model/model_test_faults.h"

namespace kascade {
namespace {

using testing::HasSubstr;
using Bytes = GgufBuilder::Bytes;

GgufBuilder small_file() {
  GgufBuilder file;
  file.set("text", "value").set("number", 7u).set("real", 1.5f).set("yes", true);
  file.set("texts", std::vector<std::string>{"a", "", "ccc"}).set("ints", std::vector<int32_t>{3, 3, 3});
  file.set("floats", std::vector<float>{0.5f, -1});
  file.add_tensor("one", {3, 2}, 1).add_tensor("two", {5}, 2);
  return file;
}

GgufFile parse(const Bytes& bytes) { return GgufFile::parse(bytes, "F"); }

template <class E>
std::string parse_fault(const Bytes& bytes) {
  return fault_of<E>([&] { parse(bytes); });
}
template <class E>
std::string parse_fault(const std::function<void(GgufBuilder&)>& change) {
  GgufBuilder file = small_file();
  change(file);
  return parse_fault<E>(file.bytes());
}

Bytes bytes_of(std::string_view text) {
  Bytes bytes;
  GgufBuilder::append(bytes, text.data(), text.size());
  return bytes;
}

TEST(GgufFile, ReadsMetadataAndTensors) {
  for (const uint32_t version : {2u, 3u}) {
    GgufBuilder builder = small_file();
    builder.version = version;
    const Bytes bytes = builder.bytes();
    const GgufFile file = parse(bytes);
    EXPECT_EQ(file.string("text"), "value");
    EXPECT_EQ(file.integer("number", 0, 10), 7);
    EXPECT_EQ(file.number("real"), 1.5);
    EXPECT_EQ(file.find_flag("yes"), true);
    EXPECT_EQ(file.find_strings("texts"), (std::vector<std::string_view>{"a", "", "ccc"}));
    EXPECT_EQ(file.find_uniform_integer("ints", 0, 3), 3);
    EXPECT_EQ(file.find_uniform_integer("number", 0, 7), 7);
    EXPECT_EQ(file.find_floats("floats"), (std::vector<float>{0.5f, -1}));
    EXPECT_EQ(file.find_integer("none", 0, 1), std::nullopt);
    EXPECT_EQ(file.find_scalar("yes"), 1.0);
    EXPECT_EQ(file.find_scalar("text"), std::nullopt);
    EXPECT_EQ(file.keys().size(), 7u);
    ASSERT_EQ(file.tensors().size(), 2u);
    EXPECT_EQ(file.tensors()[0].name, "one");
    EXPECT_EQ(file.tensors()[0].shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(file.tensors()[1].shape, (std::vector<int64_t>{5}));
    EXPECT_EQ(static_cast<const float*>(file.tensors()[1].data)[4], 2);
  }
}

TEST(GgufFile, EveryIntegerTypeReads) {
  GgufBuilder builder;
  builder.set_scalar("u8", 0, uint8_t{200})
      .set_scalar("i8", 1, int8_t{-3})
      .set_scalar("u16", 2, uint16_t{60000});
  builder.set_scalar("i16", 3, int16_t{-300})
      .set_scalar("u32", 4, uint32_t{4000000000})
      .set_scalar("i32", 5, -70000);
  builder.set_scalar("u64", 10, uint64_t{1} << 40).set_scalar("i64", 11, -(int64_t{1} << 40));
  builder.set_scalar("huge", 10, ~uint64_t{0}).set_scalar("f64", 12, 0.1);
  const Bytes bytes = builder.bytes();
  const GgufFile file = parse(bytes);
  const auto read = [&](const char* key) { return file.integer(key, INT64_MIN, INT64_MAX); };
  EXPECT_EQ(read("u8"), 200);
  EXPECT_EQ(read("i8"), -3);
  EXPECT_EQ(read("u16"), 60000);
  EXPECT_EQ(read("i16"), -300);
  EXPECT_EQ(read("u32"), 4000000000);
  EXPECT_EQ(read("i32"), -70000);
  EXPECT_EQ(read("u64"), int64_t{1} << 40);
  EXPECT_EQ(read("i64"), -(int64_t{1} << 40));
  EXPECT_EQ(file.number("f64"), 0.1);
  EXPECT_EQ(fault_of<BadFile>([&] { file.integer("huge", 0, INT64_MAX); }),
            "F: metadata 'huge': expected an integer in 0..9223372036854775807, got the uint64 "
            "18446744073709551615");
}

TEST(GgufFile, TypedAccessNamesKeyExpectedAndActual) {
  const Bytes bytes = small_file().bytes();
  const GgufFile file = parse(bytes);
  EXPECT_EQ(fault_of<BadFile>([&] { file.integer("number", 8, 9); }),
            "F: metadata 'number': expected an integer in 8..9, got the uint32 7");
  EXPECT_EQ(fault_of<BadFile>([&] { file.integer("yes", 0, 1); }),
            "F: metadata 'yes': expected an integer in 0..1, got true");
  EXPECT_EQ(fault_of<BadFile>([&] { file.integer("none", 0, 1); }), "F: metadata 'none': missing");
  EXPECT_EQ(fault_of<BadFile>([&] { file.number("number"); }),
            "F: metadata 'number': expected a finite float, got the uint32 7");
  EXPECT_EQ(fault_of<BadFile>([&] { file.string("real"); }),
            "F: metadata 'real': expected a string, got the float32 1.5");
  EXPECT_EQ(fault_of<BadFile>([&] { file.find_flag("text"); }),
            "F: metadata 'text': expected a bool, got the string 'value'");
  EXPECT_EQ(fault_of<BadFile>([&] { file.find_strings("ints"); }),
            "F: metadata 'ints': expected an array of strings, got an array of 3 int32");
  EXPECT_THROW(file.find_integers("texts"), BadFile);
  EXPECT_THROW(file.find_integers("text"), BadFile);
  EXPECT_THROW(file.find_floats("ints"), BadFile);
}

TEST(GgufFile, ValuesThatDifferBetweenLayersAreUnsupported) {
  GgufBuilder builder;
  builder.set("ints", std::vector<int32_t>{3, 4}).set("none", std::vector<int32_t>{});
  const Bytes bytes = builder.bytes();
  const GgufFile file = parse(bytes);
  EXPECT_THAT(fault_of<Unsupported>([&] { file.find_uniform_integer("ints", 0, 9); }), HasSubstr("'ints'"));
  EXPECT_THROW(file.find_uniform_integer("none", 0, 9), BadFile);
}

TEST(GgufFile, NonFiniteNumbersAreRefused) {
  GgufBuilder builder;
  builder.set("nan", std::nanf("")).set_scalar("inf", 12, HUGE_VAL);
  const Bytes bytes = builder.bytes();
  const GgufFile file = parse(bytes);
  EXPECT_THROW(file.number("nan"), BadFile);
  EXPECT_THROW(file.number("inf"), BadFile);
}

TEST(GgufFile, WhatIsNoGgufFileGetsOneClearLine) {
  EXPECT_EQ(parse_fault<BadFile>(bytes_of("")),
            "F: not a GGUF file: expected it to start with 'GGUF', got ''");
  EXPECT_THAT(parse_fault<BadFile>(bytes_of("GG")), HasSubstr("got 'GG'"));
  EXPECT_THAT(parse_fault<BadFile>(bytes_of("<!DOCTYPE html><html>")), HasSubstr("a web page"));
  EXPECT_THAT(parse_fault<BadFile>(bytes_of("version https://git-lfs.github.com/spec/v1\noid sha256:0")),
              HasSubstr("Git LFS pointer"));
  EXPECT_THAT(parse_fault<BadFile>(bytes_of("PK\x03\x04rest of an archive")), HasSubstr("zip archive"));
  EXPECT_THAT(parse_fault<BadFile>(bytes_of("tjgg\x03\x00\x00\x00 more bytes")),
              HasSubstr("older than GGUF"));
  EXPECT_THAT(parse_fault<BadFile>(bytes_of("GGUF")), HasSubstr("expected 4 bytes at offset 4, got 0"));
}

TEST(GgufFile, OtherVersionsAreRefusedByName) {
  EXPECT_THAT(parse_fault<Unsupported>([](GgufBuilder& f) { f.version = 1; }),
              HasSubstr("GGUF version: expected 2 or 3"));
  EXPECT_THAT(parse_fault<Unsupported>([](GgufBuilder& f) { f.version = 4; }), HasSubstr("got 4"));
  EXPECT_THAT(parse_fault<Unsupported>([](GgufBuilder& f) { f.version = 0; }), HasSubstr("got 0"));
  EXPECT_THAT(parse_fault<Unsupported>([](GgufBuilder& f) { f.version = 0x03000000; }),
              HasSubstr("big-endian 3"));
}

TEST(GgufFile, CountsAreBoundedByTheBytesLeft) {
  for (const uint64_t count : {uint64_t{1000}, uint64_t{1} << 32, uint64_t{1} << 62, ~uint64_t{0} - 1}) {
    EXPECT_THAT(parse_fault<BadFile>([&](GgufBuilder& f) { f.tensor_count = count; }),
                HasSubstr("tensor count"));
    EXPECT_THAT(parse_fault<BadFile>([&](GgufBuilder& f) { f.key_count = count; }),
                HasSubstr("metadata count"));
  }
}

TEST(GgufFile, StringAndArrayLengthsAreBoundedByTheBytesLeft) {
  for (const uint64_t length :
       {uint64_t{100'000}, uint64_t{1} << 61, (uint64_t{1} << 62) + 1, ~uint64_t{0}}) {
    Bytes text;
    GgufBuilder::put(text, uint32_t{8});
    GgufBuilder::put(text, length);
    EXPECT_THROW(parse(small_file().set_raw("x", text).bytes()), BadFile);
    for (const uint32_t element : {0u, 4u, 8u, 10u}) {
      Bytes array;
      GgufBuilder::put(array, uint32_t{9});
      GgufBuilder::put(array, element);
      GgufBuilder::put(array, length);
      EXPECT_THAT(parse_fault<BadFile>(small_file().set_raw("x", array).bytes()),
                  HasSubstr("'x': array length"));
    }
  }
}

TEST(GgufFile, BadKeysAndValues) {
  EXPECT_THAT(parse_fault<BadFile>([](GgufBuilder& f) { f.metadata.push_back(f.metadata[0]); }),
              HasSubstr("'text': the key occurs twice"));
  EXPECT_THAT(parse_fault<BadFile>([](GgufBuilder& f) { f.set("", 1u); }), HasSubstr("key length"));
  EXPECT_THAT(parse_fault<BadFile>([](GgufBuilder& f) { f.set(std::string(1025, 'k'), 1u); }),
              HasSubstr("key length"));
  EXPECT_THAT(parse_fault<BadFile>([](GgufBuilder& f) { f.set_scalar("x", 13, 1u); }),
              HasSubstr("value type: expected 0..12, got 13"));
  EXPECT_THAT(parse_fault<BadFile>([](GgufBuilder& f) { f.set_scalar("x", 7, uint8_t{2}); }),
              HasSubstr("bool: expected 0 or 1, got 2"));
  Bytes nested;
  for (const uint32_t word : {9u, 9u, 1u, 0u, 9u, 1u, 0u}) GgufBuilder::put(nested, word);
  EXPECT_THAT(parse_fault<Unsupported>(small_file().set_raw("x", nested).bytes()),
              HasSubstr("arrays of arrays"));
}

TEST(GgufFile, TensorFaults) {
  using Builder = GgufBuilder;
  const struct {
    const char* expected;
    std::function<void(Builder&)> change;
  } kCases[] = {
      {"'one': the name occurs twice", [](Builder& f) { f.tensors[1].name = "one"; }},
      {"name length: expected 1..1024, got 0", [](Builder& f) { f.tensors[0].name = ""; }},
      {"'one': dimensions: expected 1..4, got 0", [](Builder& f) { f.tensors[0].dimensions = {}; }},
      {"'one': dimensions: expected 1..4, got 5",
       [](Builder& f) {
         f.tensors[0].dimensions = {1, 1, 1, 1, 1};
       }},
      {"'one': dimension 0: expected 1..",
       [](Builder& f) {
         f.tensors[0].dimensions = {0, 2};
       }},
      {"'one': dimension 1: expected 1..",
       [](Builder& f) {
         f.tensors[0].dimensions = {2, 0};
       }},
      {"'one': dimension 0: expected 1..",
       [](Builder& f) {
         f.tensors[0].dimensions = {uint64_t{1} << 63, 2};
       }},
      {"'one': the product of its dimensions",
       [](Builder& f) {
         f.tensors[0].dimensions = {1, uint64_t{1} << 32, uint64_t{1} << 32};
       }},
      {"'one': its size does not fit",
       [](Builder& f) {
         f.tensors[0].dimensions = {uint64_t{1} << 62, 2};
       }},
      {"'one': its size does not fit",
       [](Builder& f) {
         f.tensors[0].dimensions = {uint64_t{1} << 32, uint64_t{1} << 30};
       }},
      {"'one': expected 4096 bytes at offset 0", [](Builder& f) { f.tensors[0].dimensions = {1024}; }},
      {"'two': offset: expected a multiple of 32, got 33", [](Builder& f) { f.tensors[1].offset = 33; }},
      {"'two': expected 20 bytes at offset 64", [](Builder& f) { f.tensors[1].offset = 64; }},
      {"'two': expected 20 bytes at offset 18446744073709551584",
       [](Builder& f) { f.tensors[1].offset = ~uint64_t{31}; }},
      {"offset 0 lies inside another tensor", [](Builder& f) { f.tensors[1].offset = 0; }},
      {"'two': dimension 0: expected a multiple of 32 for Q4_0, got 5",
       [](Builder& f) { f.tensors[1].type = 2; }},
      {"'two': dimension 0: expected a multiple of 256 for Q6_K, got 5",
       [](Builder& f) { f.tensors[1].type = 14; }},
      {"'two': type: 4 is no known type", [](Builder& f) { f.tensors[1].type = 4; }},
      {"'two': type: 4294967295 is no known type", [](Builder& f) { f.tensors[1].type = ~uint32_t{0}; }},
  };
  for (const auto& fault : kCases) EXPECT_THAT(parse_fault<BadFile>(fault.change), HasSubstr(fault.expected));
  EXPECT_THAT(parse_fault<Unsupported>([](Builder& f) { f.tensors[1].type = 23; }),
              HasSubstr("'two': type: expected F32, F16, BF16, Q4_0"));
}

TEST(GgufFile, GapsAndTrailingBytesAreRefused) {
  EXPECT_THAT(parse_fault<BadFile>([](GgufBuilder& f) {
                f.tensors[0].data.resize(70);
                f.tensors[1].offset = 96;
              }),
              HasSubstr("'two': offset: expected the next multiple of 32 after 24, got 96"));
  EXPECT_THAT(parse_fault<BadFile>([](GgufBuilder& f) { f.tensors[1].data.resize(60); }),
              HasSubstr("end of the tensor data: expected at most 31 bytes of padding, got 44"));
  // The last tensor need not be padded.
  Bytes bytes = small_file().bytes();
  bytes.resize(bytes.size() - 12);
  EXPECT_NO_THROW(parse(bytes));
  bytes.resize(bytes.size() - 1);
  EXPECT_THAT(parse_fault<BadFile>(bytes), HasSubstr("'two': expected 20 bytes at offset 32"));
}

TEST(GgufFile, TableMayNameTensorsInAnyOrder) {
  GgufBuilder builder = small_file();
  std::swap(builder.tensors[0].name, builder.tensors[1].name);
  std::swap(builder.tensors[0].dimensions, builder.tensors[1].dimensions);
  std::swap(builder.tensors[0].offset, builder.tensors[1].offset);
  builder.tensors[0].offset = 32;
  builder.tensors[1].offset = 0;
  const Bytes bytes = builder.bytes();
  const GgufFile file = parse(bytes);
  EXPECT_EQ(file.tensors()[0].name, "two");
  EXPECT_LT(file.tensors()[1].data, file.tensors()[0].data);
}

TEST(GgufFile, AlignmentIsAPowerOfTwo) {
  for (const uint32_t alignment : {0u, 1u, 7u, 24u, 1u << 21})
    EXPECT_THAT(parse_fault<BadFile>([&](GgufBuilder& f) { f.set("general.alignment", alignment); }),
                HasSubstr("general.alignment"));
  GgufBuilder builder = small_file();
  builder.set("general.alignment", 64u).alignment = 64;
  const Bytes bytes = builder.bytes();
  EXPECT_EQ(static_cast<const float*>(parse(bytes).tensors()[1].data)[0], 2);
}

TEST(GgufFile, HostileNamesStayOnOneLine) {
  const std::string message = parse_fault<BadFile>([](GgufBuilder& f) {
    f.tensors[0].name = std::string(1000, '\n');
    f.tensors[0].type = 99;
  });
  EXPECT_LT(message.size(), 500u);
}

TEST(GgufFile, EveryTruncationIsAnError) {
  const Bytes whole = small_file().bytes();
  for (size_t size = 0; size < whole.size() - 12; ++size) {
    Bytes part = whole;
    part.resize(size);
    EXPECT_THROW(parse(part), Error) << size;
  }
}

TEST(GgufFile, MisalignedBytesAreACallersError) {
  const Bytes whole = small_file().bytes();
  EXPECT_THROW(GgufFile::parse(std::span(whole).subspan(1), "F"), BadArgument);
}

}  // namespace
}  // namespace kascade
