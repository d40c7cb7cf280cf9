// SPDX-License-Identifier: Apache-2.0
#include "engine/text_stream.h"

#include <gtest/gtest.h>

#include <string>

namespace kascade {
namespace {

/// The text of pieces pushed one by one, with '|' after each piece that released anything.
std::string released(TextStream& stream, const std::vector<std::string>& pieces) {
  std::string all;
  for (const std::string& piece : pieces) {
    const std::string_view text = stream.push(piece);
    all += text;
    if (!text.empty()) all += '|';
  }
  return all + std::string(stream.finish());
}

TEST(TextStream, WithoutStopsEverythingLeavesAtOnce) {
  TextStream stream({});
  EXPECT_EQ(released(stream, {"ab", "", "c"}), "ab|c|");
  EXPECT_EQ(stream.text(), "abc");
  EXPECT_FALSE(stream.stopped());
}

TEST(TextStream, AStopAcrossPiecesNeverShows) {
  TextStream stream({"STOP"});
  EXPECT_EQ(released(stream, {"one S", "T", "O", "P two"}), "one |");
  EXPECT_EQ(stream.text(), "one ");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.push("more"), "");
  EXPECT_EQ(stream.finish(), "");
}

TEST(TextStream, AHeadThatComesToNothingIsReleased) {
  TextStream stream({"STOP"});
  EXPECT_EQ(released(stream, {"ST", "OX", "S"}), "STOX|S");
  EXPECT_EQ(stream.text(), "STOXS");
}

TEST(TextStream, OverlappingHeads) {
  // After "aab" comes to nothing, its tail "ab" may still begin the stop.
  TextStream stream({"abab!"});
  EXPECT_EQ(released(stream, {"ab", "ab", "ab", "!x"}), "ab|");
  EXPECT_EQ(stream.text(), "ab");
}

TEST(TextStream, TheFirstOfSeveralStopsWins) {
  TextStream stream({"later", "b", "bc"});
  EXPECT_EQ(released(stream, {"a", "bc later"}), "a|");
  EXPECT_EQ(stream.text(), "a");
}

TEST(TextStream, AStopAtTheVeryBeginning) {
  TextStream stream({"\n"});
  EXPECT_EQ(released(stream, {"\nabc"}), "");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.text(), "");
}

TEST(TextStream, EverySplitOfATextGivesTheSame) {
  const std::string text = "xxabxababcxx";
  for (size_t i = 0; i <= text.size(); ++i)
    for (size_t j = i; j <= text.size(); ++j) {
      TextStream stream({"ababc", "zz"});
      std::string all;
      for (const std::string& piece : {text.substr(0, i), text.substr(i, j - i), text.substr(j)})
        all += stream.push(piece);
      all += stream.finish();
      EXPECT_EQ(all, "xxabx") << i << " " << j;
    }
}

}  // namespace
}  // namespace kascade
