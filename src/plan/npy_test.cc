// SPDX-License-Identifier: Apache-2.0
#include "plan/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/json.h"
#include "plan/plan_test_util.h"

namespace kascade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

// A .npy file of the given header and data, in version 1 or 2 of the format.
std::string npy(const std::string& header, const std::string& data, int version = 1) {
  std::string file = "\x93NUMPY";
  file += static_cast<char>(version);
  file += '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) file += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return file + header + data;
}

template <class T>
std::string raw(std::initializer_list<T> values) {
  std::string out;
  for (const T value : values) out.append(reinterpret_cast<const char*>(&value), sizeof(T));
  return out;
}

const std::string kMapHeader = "{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }          \n";
const std::string kMapData = raw<int32_t>({0, 1, 1, 1, 0, 1});

Plan map_plan(const std::string& file, const std::vector<int>& anchors = {0, 2}) {
  return plan_from_npy(bytes_of(file), anchors, "M");
}

TEST(Npy, ReadsInt32AndInt64) {
  const Plan plan = map_plan(npy(kMapHeader, kMapData));
  EXPECT_EQ(plan.model.layers, 3);
  EXPECT_EQ(plan.model.kv_heads, 2);
  EXPECT_EQ(plan.settings.method, "imported");
  EXPECT_THAT(plan.head_map, ElementsAre(ElementsAre(0, 1), ElementsAre(1, 1), ElementsAre(0, 1)));
  EXPECT_FALSE(plan.validation.has_value());
  const std::string wide =
      npy("{'descr': '<i8', 'fortran_order': False, 'shape': (3, 2)}", raw<int64_t>({0, 1, 1, 1, 0, 1}), 2);
  EXPECT_EQ(map_plan(wide).head_map, plan.head_map);
}

TEST(Npy, HeadersAsNumPyHasWrittenThem) {
  for (const char* header : {"{\"descr\": \"<i4\", \"fortran_order\": False, \"shape\": (3, 2)}",
                             "{'shape': (3L, 2L), 'fortran_order': False, 'descr': '<i4'}",
                             "{'descr':'<i4','fortran_order':False,'shape':(3,2,),}\n",
                             "  { 'fortran_order' : False ,\n 'descr' : '<i4' , 'shape' : ( 3 , 2 ) }  "})
    for (const int version : {1, 2, 3})
      EXPECT_EQ(map_plan(npy(header, kMapData, version)).model.layers, 3) << header;
}

TEST(Npy, ArraysOfAnyRank) {
  const std::string scalar = npy("{'descr': '<f8', 'fortran_order': False, 'shape': ()}", raw<double>({1.5}));
  EXPECT_EQ(parse_npy(bytes_of(scalar), "M").elements, 1u);
  const std::string empty = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 0, 9)}", "");
  EXPECT_EQ(parse_npy(bytes_of(empty), "M").elements, 0u);
  const std::string vector = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (3,)}", "abc");
  EXPECT_THAT(parse_npy(bytes_of(vector), "M").shape, ElementsAre(3));
}

TEST(Npy, MalformedHeadersNameTheField) {
  struct Case {
    const char* header;
    const char* message;
  };
  const Case cases[] = {
      {"", "field 'header': expected '{'"},
      {"{", "field 'header key': expected a string"},
      {"{}", "field 'descr': expected a type string, got nothing"},
      {"{'descr': '<i4', 'shape': (3, 2)}", "field 'fortran_order': expected True or False, got nothing"},
      {"{'descr': '<i4', 'fortran_order': False}", "field 'shape': expected a tuple, got nothing"},
      {"{'descr': '<i4', 'fortran_order': True, 'shape': (3, 2)}",
       "field 'fortran_order': expected False (C order)"},
      {"{'descr': '<i4', 'fortran_order': 0, 'shape': (3, 2)}",
       "field 'fortran_order': expected True or False"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': [3, 2]}", "field 'shape': expected '('"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (3, -2)}",
       "field 'shape': expected extents below 2^64"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (3, 99999999999999999999)}",
       "expected extents below 2^64"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}", "field 'shape'"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (18446744073709551615, 2)}", "overflows"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2", "field 'shape': expected ')'"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (3 2)}", "field 'shape': expected ')'"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (,)}", "field 'shape'"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2)} x", "expected nothing after '}', got 'x'"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), 'extra': 1}", "got 'extra'"},
      {"{'descr': '<i4', 'descr': '<i4', 'fortran_order': False, 'shape': (3, 2)}",
       "field 'descr': expected one entry"},
      {"{'descr': '<i4, 'fortran_order': False, 'shape': (3, 2)}", "field 'header'"},
      {"{'descr': '<i4", "field 'descr': expected a closing quote"},
      {"{'descr': '\\x3ci4', 'fortran_order': False, 'shape': (3, 2)}", "field 'descr': expected no escapes"},
      {"{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (3, 2)}",
       "field 'descr': expected a string"},
      {"{'descr': '|O', 'fortran_order': False, 'shape': (3, 2)}",
       "field 'descr': expected a plain number type"},
      {"{'descr': '<i0', 'fortran_order': False, 'shape': (3, 2)}", "field 'descr'"},
      {"{'descr': '<i99999999999999999999', 'fortran_order': False, 'shape': (3, 2)}", "field 'descr'"},
      {"{'descr': '<i4x', 'fortran_order': False, 'shape': (3, 2)}", "field 'descr'"},
      {"{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (3, 2)}", "field 'descr'"},
      {"{'descr': '>i4', 'fortran_order': False, 'shape': (3, 2)}",
       "expected '<i4' or '<i8' (a head map), got '>i4'"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2)}",
       "expected '<i4' or '<i8' (a head map), got '<f4'"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (6,)}",
       "field 'shape': expected (layers 1..1024, kv_heads"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2, 1)}", "field 'shape': expected (layers"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4, 2)}",
       "data: expected 32 bytes (shape (4, 2) of <i4), got 24"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 2)}", "data: expected 16 bytes"},
      {"{'descr': '<i8', 'fortran_order': False, 'shape': (3, 2)}", "data: expected 48 bytes"},
  };
  for (const Case& c : cases)
    EXPECT_THAT(message_of<BadFile>([&] { map_plan(npy(c.header, kMapData)); }), HasSubstr(c.message))
        << c.header;
}

TEST(Npy, MalformedPreambles) {
  const std::string good = npy(kMapHeader, kMapData);
  EXPECT_THROW(map_plan(""), BadFile);
  EXPECT_THROW(map_plan("{\"format\": \"kascade-plan\"}"), BadFile);
  for (size_t size = 0; size < good.size(); ++size)
    EXPECT_THROW(map_plan(good.substr(0, size)), BadFile) << size;
  EXPECT_THAT(message_of<BadFile>([&] { map_plan(good + '\0'); }), HasSubstr("expected 24 bytes"));
  for (const int version : {0, 4, 255})
    EXPECT_THAT(message_of<BadFile>([&] { map_plan(npy(kMapHeader, kMapData, version)); }),
                HasSubstr("version"));
  std::string minor = good;
  minor[7] = 1;
  EXPECT_THROW(map_plan(minor), BadFile);
  std::string length = npy(kMapHeader, kMapData, 2);  // a header that claims 4 GB
  length.replace(8, 4, "\xff\xff\xff\xff");
  EXPECT_THAT(message_of<BadFile>([&] { map_plan(length); }), HasSubstr("header length"));
}

TEST(Npy, AnyByteMayBeSpoiled) {
  const std::string good = npy(kMapHeader, kMapData);
  for (size_t at = 0; at < good.size(); ++at) {
    for (int byte = 0; byte < 256; byte += 3) {
      std::string spoiled = good;
      spoiled[at] = static_cast<char>(byte);
      try {
        validate_plan(map_plan(spoiled));
      } catch (const BadFile&) {
      }
    }
  }
}

TEST(Npy, EntriesAndAnchorsAreChecked) {
  const auto file = [](std::initializer_list<int32_t> entries) {
    return npy(kMapHeader, raw<int32_t>(entries));
  };
  EXPECT_THAT(message_of<BadFile>([&] {
                map_plan(file({0, 1, 2, 1, 0, 1}));
              }),
              HasSubstr("entry [1][0]: expected a KV head in 0..1, got 2"));
  EXPECT_THAT(message_of<BadFile>([&] { map_plan(file({0, 1, 1, -1, 0, 1})); }), HasSubstr("entry [1][1]"));
  EXPECT_THAT(message_of<BadFile>([&] {
                map_plan(file({0, 1, 1, 1, 1, 0}));
              }),
              HasSubstr("M: field 'head_map[2][0]': expected 0 (layer 2 is an anchor"));
  EXPECT_THAT(message_of<BadFile>([&] {
                map_plan(npy(kMapHeader, kMapData), {0, 3});
              }),
              HasSubstr("'anchors[1]'"));
}

TEST(Npy, AnchorsStandInTheName) {
  EXPECT_THAT(anchors_from_name("a/b_layers_9/Model-3.1_layers_0_2_8.npy"), ElementsAre(0, 2, 8));
  EXPECT_THAT(anchors_from_name("layers_0.npy"), ElementsAre(0));
  for (const char* name :
       {"model.npy", "layers_/model.npy", "x_layers_.npy", "x_layers_0_.npy", "x_layers_0__2.npy",
        "x_layers_0_2x.npy", "x_layers_-1.npy", "x_layers_0_99999999999.npy", "players_0_2.npy", ""})
    EXPECT_THROW(anchors_from_name(name), BadArgument) << name;
}

TEST(ImportNpy, PublishedMaps) {
  struct Case {
    const char* name;
    int layers;
    std::vector<int> anchors;
    double
        mean_distinct;  // anchor heads that a reuse layer names: 3.3 of 8 (Llama), 3.7 (Qwen), as published
    int layer0_head;    // layer 1 alone reads layer 0's sets, and only this head
  };
  const Case cases[] = {{"Meta-Llama-3.1-8B-Instruct_layers_0_2_8_13_14", 32, {0, 2, 8, 13, 14}, 3.3, 0},
                        {"Qwen3-8B_layers_0_2_7_14_23", 36, {0, 2, 7, 14, 23}, 3.7, 1}};
  for (const Case& c : cases) {
    const std::string path = std::string(KASCADE_FIXTURES) + "/reference_plans/" + c.name + ".npy";
    const Plan plan = import_npy(path, {});
    EXPECT_EQ(plan.model.layers, c.layers);
    EXPECT_EQ(plan.model.kv_heads, 8);
    EXPECT_EQ(plan.anchors, c.anchors);
    for (const int anchor : c.anchors)
      EXPECT_THAT(plan.head_map[anchor], ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
    double distinct = 0;
    for (int layer = 0; layer < c.layers; ++layer)
      if (!plan.is_anchor(layer))
        distinct += static_cast<double>(
            std::set<int>(plan.head_map[layer].begin(), plan.head_map[layer].end()).size());
    EXPECT_NEAR(distinct / (c.layers - 5), c.mean_distinct, 0.05) << c.name;
    std::vector<uint8_t> one_head(8, 0);
    one_head[c.layer0_head] = 1;
    EXPECT_EQ(plan.needed_heads(0), one_head);
    // It is a plan like any other.
    EXPECT_TRUE(diff_plans(parse_plan(plan_to_json(plan), "memory"), plan).empty());
  }
  const Plan llama = import_npy(std::string(KASCADE_FIXTURES) + "/reference_plans/" + cases[0].name + ".npy",
                                {0, 2, 8, 13, 14});
  EXPECT_THAT(llama.needed_heads(13), ::testing::Each(0));  // anchor 14 follows at once
}

TEST(ImportNpy, GivenAnchorsMustMapToThemselves) {
  const std::string path = std::string(KASCADE_FIXTURES) + "/reference_plans/Qwen3-8B_layers_0_2_7_14_23.npy";
  EXPECT_EQ(import_npy(path, {0, 2}).anchors, (std::vector<int>{0, 2}));
  EXPECT_THAT(message_of<BadFile>([&] { import_npy(path, {0, 3}); }), HasSubstr("layer 3 is an anchor"));
  EXPECT_THROW(import_npy("/nonexistent/x_layers_0_2.npy", {}), IoError);
}

}  // namespace
}  // namespace kascade
