// SPDX-License-Identifier: Apache-2.0
// For tests of loaders: the message of the exception that a call throws.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kascade/error.h"

namespace kascade {

/// The message of the E that call throws, which must be one line of sane length; fails the test when it
/// throws none.
template <class E, class F>
std::string fault_of(F&& call) {
  try {
    call();
  } catch (const E& error) {
    const std::string message = error.what();
    EXPECT_LT(message.size(), 1000u) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

}  // namespace kascade
