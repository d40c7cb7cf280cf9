// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/json.h"
#include "kascade/plan.h"
#include "plan/plan_test_util.h"

namespace kascade {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// The sample with one key (dotted, array indices as numbers) set to a JSON text, or removed when the text is
// empty.
std::string with(const std::string& pointer, const std::string& value) {
  Json root = Json::parse(plan_to_json(sample_plan()));
  const Json::json_pointer at(pointer);
  if (value.empty())
    root[at.parent_pointer()].erase(at.back());
  else
    root[at] = Json::parse(value);
  return root.dump();
}

TEST(PlanJson, RoundTripKeepsEveryFieldAndByte) {
  const Plan plan = sample_plan();
  const std::string json = plan_to_json(plan);
  const Plan read = parse_plan(json, "memory");
  EXPECT_TRUE(diff_plans(plan, read).empty());
  EXPECT_EQ(read.validation->prompts, 12);
  EXPECT_EQ(plan_to_json(read), json);
  EXPECT_EQ(json.back(), '\n');
}

TEST(PlanJson, DoublesSurviveExactly) {
  Plan plan = sample_plan();
  plan.similarity[0][1] = 0.1 + 0.2;  // 0.30000000000000004
  plan.objective = 5e-324;
  plan.importance[0] = 1.0 / 3;
  const Plan read = parse_plan(plan_to_json(plan), "memory");
  EXPECT_EQ(read.similarity, plan.similarity);
  EXPECT_EQ(read.objective, plan.objective);
  EXPECT_EQ(read.importance, plan.importance);
}

TEST(PlanJson, HasTheDocumentedKeys) {
  const Json root = Json::parse(plan_to_json(sample_plan()));
  for (const char* key :
       {"format", "version", "model", "anchors", "head_map", "importance", "similarity", "settings", "data",
        "candidates", "validation", "validated", "objective", "retained_mass", "tool_version"})
    EXPECT_TRUE(root.contains(key)) << key;
  EXPECT_EQ(root["format"], "kascade-plan");
  EXPECT_EQ(root["version"], 1);
  EXPECT_EQ(root["validated"], true);
  for (const char* key : {"architecture", "layers", "query_heads", "kv_heads", "head_dim", "fingerprint"})
    EXPECT_TRUE(root["model"].contains(key)) << key;
  for (const char* key : {"tile", "similarity_k", "aggregation", "forward", "importance"})
    EXPECT_TRUE(root["settings"].contains(key)) << key;
  for (const char* key : {"name", "prompts", "tokens", "hash"})
    EXPECT_TRUE(root["data"].contains(key)) << key;
  for (const char* key : {"anchors", "kl", "top1", "passkey"})
    EXPECT_TRUE(root["candidates"][0].contains(key)) << key;
  for (const char* key : {"kl", "top1", "passkey", "prompts", "passed"})
    EXPECT_TRUE(root["validation"].contains(key)) << key;
}

TEST(PlanJson, OneRowALine) {
  const std::string json = plan_to_json(sample_plan());
  EXPECT_THAT(
      json,
      StartsWith("{\n  \"format\": \"kascade-plan\",\n  \"version\": 1,\n  \"model\": {\"architecture\": "
                 "\"llama\", \"layers\": 6,"));
  EXPECT_THAT(json, HasSubstr("  \"head_map\": [\n    [0, 1],\n    [0, 1],\n    [1, 1],\n"));
}

TEST(PlanJson, WhatIsOptionalMayBeAbsentOrNull) {
  for (const char* key :
       {"/importance", "/similarity", "/retained_mass", "/data", "/candidates", "/objective", "/tool_version",
        "/settings/method", "/settings/budget", "/settings/tensor_parallel", "/settings/percent_hundredths",
        "/candidates/0/objective", "/validation/passkey_dense"}) {
    EXPECT_NO_THROW(parse_plan(with(key, ""), "memory")) << key;
    EXPECT_NO_THROW(parse_plan(with(key, "null"), "memory")) << key;
  }
  Json root = Json::parse(with("/validation", "null"));
  EXPECT_THROW(parse_plan(root.dump(), "memory"), BadFile);  // still says "validated": true
  root.erase("validated");
  EXPECT_FALSE(parse_plan(root.dump(), "memory").validation.has_value());
  EXPECT_NO_THROW(parse_plan(with("/a_later_key", "[1, {}]"), "memory"));
}

TEST(PlanJson, APlanThatWasNotValidatedSaysSo) {
  Plan plan = sample_plan();
  plan.validation.reset();
  const Json root = Json::parse(plan_to_json(plan));
  EXPECT_TRUE(root["validation"].is_null());
  EXPECT_EQ(root["validated"], false);
  plan.validation = PlanValidation{0.5, 0.5, 0.5, 1, 3, false};
  EXPECT_EQ(Json::parse(plan_to_json(plan))["validated"], false);
}

TEST(PlanJson, MalformedFieldsAreNamed) {
  struct Case {
    const char* pointer;
    const char* value;  // empty: removed
    const char* message;
  };
  const Case cases[] = {
      {"/format", "", "P: field 'format': missing"},
      {"/format", "\"gguf\"", "P: field 'format': expected 'kascade-plan', got 'gguf'"},
      {"/format", "7", "P: field 'format': expected a string"},
      {"/version", "", "P: field 'version': missing"},
      {"/version", "2", "P: field 'version': expected 1, got 2"},
      {"/version", "1.0", "P: field 'version'"},
      {"/version", "\"1\"", "P: field 'version'"},
      {"/model", "", "P: field 'model': missing"},
      {"/model", "[]", "P: field 'model': expected an object, got array"},
      {"/model/layers", "", "P: field 'model.layers': missing"},
      {"/model/layers", "6.5", "P: field 'model.layers': expected an integer in 0..1024"},
      {"/model/layers", "-1", "P: field 'model.layers'"},
      {"/model/layers", "1e300", "P: field 'model.layers'"},
      {"/model/layers", "18446744073709551615", "P: field 'model.layers'"},
      {"/model/layers", "5", "P: field 'head_map': expected 5 rows (model.layers), got 6"},
      {"/model/kv_heads", "4294967298", "P: field 'model.kv_heads'"},
      {"/model/kv_heads", "0", "P: field 'model.kv_heads'"},
      {"/model/architecture", "null", "P: field 'model.architecture': expected a string"},
      {"/model/fingerprint", "\"<script>\"", "P: field 'model.fingerprint'"},
      {"/anchors", "", "P: field 'anchors': missing"},
      {"/anchors", "[]", "P: field 'anchors': expected at least layer 0, got none"},
      {"/anchors", "{}", "P: field 'anchors': expected an array, got object"},
      {"/anchors/2", "99999999999999999999", "P: field 'anchors[2]': expected an integer in 0..1024"},
      {"/anchors/2", "4.0", "P: field 'anchors[2]': expected an integer in 0..1024, got 4.0"},
      {"/anchors/2", "true", "P: field 'anchors[2]': expected an integer in 0..1024, got true"},
      {"/anchors/2", "[4]", "P: field 'anchors[2]': expected an integer in 0..1024, got array"},
      {"/anchors/1", "-4", "P: field 'anchors[1]': expected an integer in 0..1024, got -4"},
      {"/anchors/2", "6", "P: field 'anchors[2]': expected a layer above 1 and below 6, got 6"},
      {"/head_map", "", "P: field 'head_map': missing"},
      {"/head_map", "\"identity\"", "P: field 'head_map': expected an array, got 'identity'"},
      {"/head_map/2", "3", "P: field 'head_map[2]': expected an array, got 3"},
      {"/head_map/2/0", "null", "P: field 'head_map[2][0]': expected an integer in 0..65536, got null"},
      {"/head_map/2/0", "2", "P: field 'head_map[2][0]': expected an integer in 0..1, got 2"},
      {"/head_map/4/0", "1", "P: field 'head_map[4][0]': expected 0 (layer 4 is an anchor"},
      {"/settings", "", "P: field 'settings': missing"},
      {"/settings/tile", "", "P: field 'settings.tile': missing"},
      {"/settings/tile", "0", "P: field 'settings.tile'"},
      {"/settings/similarity_k", "-1", "P: field 'settings.similarity_k'"},
      {"/settings/aggregation", "\"median\"",
       "P: field 'settings.aggregation': expected one of min, mean, got 'median'"},
      {"/settings/importance", "1", "P: field 'settings.importance': expected true or false, got 1"},
      {"/settings/tensor_parallel", "65537", "P: field 'settings.tensor_parallel'"},
      {"/data", "[]", "P: field 'data': expected an object, got array"},
      {"/data/hash", "", "P: field 'data.hash': missing"},
      {"/data/tokens", "-1", "P: field 'data.tokens'"},
      {"/importance", "{}", "P: field 'importance': expected an array, got object"},
      {"/importance/0", "\"0.9\"", "P: field 'importance[0]': expected a number, got '0.9'"},
      {"/importance", "[1]", "P: field 'importance': expected 6 numbers"},
      {"/similarity/0", "0", "P: field 'similarity[0]': expected an array, got 0"},
      {"/similarity/0/1", "null", "P: field 'similarity[0][1]': expected a number, got null"},
      {"/similarity", "[[1]]", "P: field 'similarity': expected 6 rows"},
      {"/retained_mass", "[1, 2]", "P: field 'retained_mass'"},
      {"/candidates", "{}", "P: field 'candidates': expected an array, got object"},
      {"/candidates/0", "[]", "P: field 'candidates[0]': expected an object, got array"},
      {"/candidates/0/kl", "", "P: field 'candidates[0].kl': missing"},
      {"/candidates/0/anchors", "[0, 77]", "P: field 'candidates[0].anchors[1]'"},
      {"/candidates/0/top1", "2", "P: field 'candidates[0].top1': expected a share in 0..1, got 2"},
      {"/validation", "true", "P: field 'validation': expected an object, got true"},
      {"/validation/passed", "", "P: field 'validation.passed': missing"},
      {"/validation/passkey", "-1", "P: field 'validation.passkey'"},
      {"/validated", "false", "P: field 'validated': expected true (validation.passed), got false"},
      {"/validated", "\"yes\"", "P: field 'validated': expected true or false, got 'yes'"},
      {"/objective", "\"NaN\"", "P: field 'objective': expected a number"},
      {"/tool_version", "1", "P: field 'tool_version': expected a string"},
  };
  for (const Case& c : cases)
    EXPECT_THAT(message_of<BadFile>([&] { parse_plan(with(c.pointer, c.value), "P"); }),
                StartsWith(c.message))
        << c.pointer << " = " << c.value;
}

TEST(PlanJson, NoDocumentAtAll) {
  for (const char* text :
       {"", "   ", "[]", "null", "3", "\"plan\"", "{", "{}", "<html></html>", "{\"format\": NaN}",
        "{\"format\":\"kascade-plan\",\"version\":1,\"objective\":1e999}",
        "{\"format\": \"a\", \"format\": \"b\"}", "\xff\xfe{}"})
    EXPECT_THROW(parse_plan(text, "memory"), BadFile) << text;
  EXPECT_THROW(parse_plan(std::string(1 << 20, '['), "memory"), BadFile);
  EXPECT_THROW(parse_plan(std::string("{}\0", 3), "memory"), BadFile);
}

TEST(PlanJson, NumbersBeyondDoubleAreRefused) {
  std::string json = plan_to_json(sample_plan());
  const std::string key = "\"objective\": 0.0625";
  for (const char* number : {"1e999", "-1e999", "NaN", "Infinity", "0x10", "1."}) {
    std::string spoiled = json;
    spoiled.replace(spoiled.find(key), key.size(), std::string("\"objective\": ") + number);
    EXPECT_THROW(parse_plan(spoiled, "memory"), BadFile) << number;
  }
}

TEST(PlanJson, EveryTruncationIsAnError) {
  const std::string json = plan_to_json(sample_plan());
  for (size_t size = 0; size + 2 < json.size(); ++size)  // the last two bytes are "}\n"
    EXPECT_THROW(parse_plan(json.substr(0, size), "memory"), BadFile) << size;
}

TEST(PlanJson, AnyByteMayBeSpoiled) {
  const std::string json = plan_to_json(sample_plan());
  for (size_t at = 0; at < json.size(); ++at) {
    for (const char byte : {'\0', '9', '"', ']', '\xff'}) {
      std::string spoiled = json;
      spoiled[at] = byte;
      try {
        validate_plan(parse_plan(spoiled, "memory"));  // what still reads is valid
      } catch (const BadFile&) {
      }
    }
  }
}

TEST(PlanJson, StringsOfAnyBytesMakeValidJson) {
  Plan plan = sample_plan();
  plan.data.name = "a\"b\\c\n\xff\x01";
  const std::string json = plan_to_json(plan);
  EXPECT_EQ(parse_plan(json, "memory").data.name, "a\"b\\c\n\xEF\xBF\xBD\x01");
}

TEST(PlanFile, SaveAndLoad) {
  const std::string path = ::testing::TempDir() + "kascade_plan_file_test.json";
  save_plan(sample_plan(), path);
  EXPECT_TRUE(diff_plans(load_plan(path), sample_plan()).empty());
  std::filesystem::remove(path);
  EXPECT_THAT(message_of<IoError>([&] { load_plan(path); }), HasSubstr(path));
  std::ofstream(path) << "{\"format\": \"kascade-plan\", \"version\": 9}";
  EXPECT_THAT(message_of<BadFile>([&] { load_plan(path); }),
              HasSubstr(path + ": field 'version': expected 1, got 9"));
  std::filesystem::remove(path);
}

TEST(PlanFile, AnUnwritablePathLeavesNothing) {
  const std::string path = ::testing::TempDir() + "no_such_folder/plan.json";
  EXPECT_THROW(save_plan(sample_plan(), path), IoError);
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace kascade
