// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "kascade/error.h"

namespace kascade {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string fault(const std::function<void()>& f) {
  try {
    f();
  } catch (const BadFile& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

std::string parse_fault(const std::string& text) {
  return fault([&] { parse_json(text, "F"); });
}

TEST(ParseJson, BuildsTheTree) {
  const Json json =
      parse_json(R"({"a": [1, -2, 3.5, true, null, "\u00e9\ud83d\ude00"], "b": {"c": {}}, "d": []})", "F");
  EXPECT_EQ(json["a"].size(), 6u);
  EXPECT_EQ(json["a"][1], -2);
  EXPECT_EQ(json["a"][2], 3.5);
  EXPECT_EQ(json["a"][5], "\xC3\xA9\xF0\x9F\x98\x80");
  EXPECT_TRUE(json["a"][4].is_null());
  EXPECT_TRUE(json["b"]["c"].is_object());
  EXPECT_TRUE(json["d"].is_array());
  EXPECT_EQ(parse_json("7", "F"), 7);
  EXPECT_EQ(parse_json("\xEF\xBB\xBF{}", "F"), Json::object());
  EXPECT_EQ(parse_json("18446744073709551615", "F").get<uint64_t>(), std::numeric_limits<uint64_t>::max());
}

TEST(ParseJson, AgreesWithTheLibraryOnNestedContainers) {
  const std::string text = R"([[1,[2,{"x":[{"y":3},4]}],5],{"z":{"w":[6]},"v":7},[],{},8])";
  EXPECT_EQ(parse_json(text, "F"), Json::parse(text));
}

TEST(ParseJson, FaultsNameTheSourceOnOneLine) {
  for (const char* text :
       {"", " ", "{", "[1,", "{\"a\" 1}", "{\"a\":1} x", "[1,]", "{'a':1}", "NaN", "1e999", "\"\x01\"",
        "\"\xFF\"", "\"\xC0\x80\"", "\"\xED\xA0\x80\"", "\"\\ud800\"", "[01]", "// c", "\"\n\""}) {
    const std::string message = parse_fault(text);
    EXPECT_THAT(message, HasSubstr("F: not valid JSON: ")) << text;
    EXPECT_EQ(message.find('\n'), std::string::npos) << text;
  }
}

TEST(ParseJson, FaultOfAHugeTokenIsShort) {
  EXPECT_LT(parse_fault("\"" + std::string(1'000'000, 'x')).size(), 400u);
}

TEST(ParseJson, DuplicateKeysAreRefused) {
  EXPECT_THAT(parse_fault(R"({"a":1,"a":1})"), HasSubstr("duplicate key 'a'"));
  EXPECT_THAT(parse_fault(R"({"o":{"k":{},"b":2,"k":[]}})"), HasSubstr("duplicate key 'k'"));
  EXPECT_THAT(parse_fault("{\"a\":1,\"\\u0061\":1}"), HasSubstr("duplicate key 'a'"));
  EXPECT_EQ(parse_json(R"([{"a":1},{"a":2}])", "F").size(), 2u);
}

std::string nested(int depth, const char* open, const char* close) {
  std::string text;
  for (int i = 0; i < depth; ++i) text += open;
  for (int i = 0; i < depth; ++i) text += close;
  return text;
}

TEST(ParseJson, DepthIsBoundedBeforeTheTreeGrows) {
  EXPECT_NO_THROW(parse_json(nested(64, "[", "]"), "F"));
  EXPECT_THAT(parse_fault(nested(65, "[", "]")), HasSubstr("nested deeper than 64"));
  EXPECT_NO_THROW(parse_json(nested(3, "[", "]"), "F", 3));
  EXPECT_THAT(fault([] { parse_json(nested(4, "[", "]"), "F", 3); }), HasSubstr("nested deeper than 3"));
  // Deep enough to overflow a stack, closed or not, in arrays and objects.
  EXPECT_THAT(parse_fault(nested(5'000'000, "[", "]")), HasSubstr("nested deeper"));
  EXPECT_THAT(parse_fault(std::string(5'000'000, '[')), HasSubstr("nested deeper"));
  std::string objects;
  for (int i = 0; i < 1'000'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(parse_fault(objects), HasSubstr("nested deeper"));
}

TEST(ParseJson, NumberOfValuesIsBounded) {
  std::string text = "[";
  for (int i = 0; i < 8'000'000; ++i) text += "0,";
  text += "0]";
  EXPECT_THAT(parse_fault(text), HasSubstr("more than 8000000 values"));
}

const Json kObject = {
    {"int", 5},           {"negative", -5}, {"float", 1.5}, {"string", "s"},
    {"null", nullptr},    {"bool", true},   {"array", {1}}, {"big", std::numeric_limits<uint64_t>::max()},
    {"inner", {{"x", 1}}}};

TEST(JsonFields, Typed) {
  EXPECT_EQ(json_int(kObject, "int", 0, 10, "F", ""), 5);
  EXPECT_EQ(json_int(kObject, "negative", -5, 10, "F", ""), -5);
  EXPECT_EQ(json_number(kObject, "float", "F", ""), 1.5);
  EXPECT_EQ(json_number(kObject, "int", "F", ""), 5.0);
  EXPECT_EQ(json_string(kObject, "string", "F", ""), "s");
  EXPECT_EQ(json_int(json_field(kObject, "inner", "F", ""), "x", 0, 1, "F", "inner"), 1);
}

TEST(JsonFields, FaultsNameSourceFieldExpectedAndActual) {
  EXPECT_EQ(fault([] { json_int(kObject, "int", 6, 10, "F", "a.b"); }),
            "F: field 'a.b.int': expected an integer in 6..10, got the integer 5");
  EXPECT_EQ(fault([] { json_field(kObject, "none", "F", "a"); }), "F: field 'a.none': missing");
  EXPECT_EQ(fault([] { json_field(kObject, "none", "F", ""); }), "F: field 'none': missing");
  EXPECT_EQ(fault([] { json_field(kObject["array"], "x", "F", "array"); }),
            "F: field 'array': expected an object, got array");
  EXPECT_EQ(fault([] { json_string(kObject, "bool", "F", ""); }),
            "F: field 'bool': expected a string, got true");
  EXPECT_EQ(fault([] { json_number(kObject, "string", "F", ""); }),
            "F: field 'string': expected a number, got the string 's'");
  const Json infinite = {{"x", std::numeric_limits<double>::infinity()}};
  EXPECT_THAT(fault([&] { json_number(infinite, "x", "F", ""); }), HasSubstr("expected a number"));
}

TEST(JsonFields, IntegersAreIntegers) {
  for (const char* field : {"float", "string", "null", "bool", "array", "big"})
    EXPECT_THAT(fault([&] { json_int(kObject, field, INT64_MIN, INT64_MAX, "F", ""); }),
                AllOf(HasSubstr(field), HasSubstr("expected an integer")));
  EXPECT_THAT(fault([] { json_int(parse_json("{\"x\":8192.0}", "F"), "x", 0, INT64_MAX, "F", ""); }),
              HasSubstr("got the number 8192.0"));
}

TEST(JsonFields, HostileKeysAndValuesStayOnOneLine) {
  const std::string message = fault([] { json_field(kObject, "a\nb'c", "F", ""); });
  EXPECT_EQ(message, "F: field 'a\\x0ab'c': missing");
  const Json object = {{"x", std::string(100'000, 'y')}};
  EXPECT_LT(fault([&] { json_int(object, "x", 0, 1, "F", ""); }).size(), 300u);
}

TEST(DumpJson, InvalidUtf8StaysValidJson) {
  const Json object = {{"text", "a\xFF\xC3"}};
  const std::string text = dump_json(object);
  EXPECT_EQ(text, "{\"text\":\"a\xEF\xBF\xBD\xEF\xBF\xBD\"}");
  EXPECT_NO_THROW(parse_json(text, "F"));
  EXPECT_EQ(dump_json(Json{{"a", 1}}, 2), "{\n  \"a\": 1\n}");
}

TEST(LoadJson, NamesThePath) {
  EXPECT_THROW(load_json("/nonexistent/x.json"), IoError);
  EXPECT_THAT(fault([] { load_json("/dev/zero", 1000); }),
              HasSubstr("/dev/zero: size: expected at most 1000"));
}

}  // namespace
}  // namespace kascade
