// SPDX-License-Identifier: Apache-2.0
// The one exception hierarchy. The library reports every failure by throwing one of these; it never prints or
// exits.
#pragma once

#include <stdexcept>
#include <string>

namespace kascade {

/// Why something failed; the C ABI and Python map this to their own codes.
enum class ErrorKind {
  kBadArgument,  // a value that the caller passed
  kBadFile,      // content of a file from outside
  kUnsupported,  // valid, but not something this build, device or kernel does
  kOutOfMemory,  // an allocation or a stated limit
  kDevice,       // a CUDA or driver call
  kIo,           // the operating system: open, read, write, rename
  kCancelled,    // the caller's cancel flag was set (Ctrl-C)
};

/// Base of all exceptions of the library. what() is one line that names the place and the values.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

/// A value passed by the caller is out of range or inconsistent.
struct BadArgument : Error {
  explicit BadArgument(const std::string& message) : Error(ErrorKind::kBadArgument, message) {}
};

/// A file from outside is malformed. The message names the file and the field, expected and actual.
struct BadFile : Error {
  explicit BadFile(const std::string& message) : Error(ErrorKind::kBadFile, message) {}
};

/// Well formed, but outside what is supported. The message names the parameter, its value and what is
/// supported.
struct Unsupported : Error {
  explicit Unsupported(const std::string& message) : Error(ErrorKind::kUnsupported, message) {}
};

/// An allocation failed or would pass a stated limit.
struct OutOfMemory : Error {
  explicit OutOfMemory(const std::string& message) : Error(ErrorKind::kOutOfMemory, message) {}
};

/// A CUDA call failed; the message carries the call and the kernel.
struct DeviceError : Error {
  explicit DeviceError(const std::string& message) : Error(ErrorKind::kDevice, message) {}
};

/// The operating system refused to open, read, write or rename a file.
struct IoError : Error {
  explicit IoError(const std::string& message) : Error(ErrorKind::kIo, message) {}
};

/// The caller's cancel flag was set; nothing half-written is left behind.
struct Cancelled : Error {
  explicit Cancelled(const std::string& message) : Error(ErrorKind::kCancelled, message) {}
};

}  // namespace kascade
