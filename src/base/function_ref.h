// SPDX-License-Identifier: Apache-2.0
// A non-owning reference to a callable: two words, never allocates. The callable must outlive the call.
#pragma once

#include <type_traits>
#include <utility>

namespace kascade {

template <class Signature>
class FunctionRef;

template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> && std::is_invocable_r_v<R, F&, Args...>)
      // Meant to convert; the constraint above leaves copies to the copy constructor.
      // NOLINTNEXTLINE(google-explicit-constructor, bugprone-forwarding-reference-overload)
      FunctionRef(F&& callable)
      : object_(const_cast<void*>(static_cast<const void*>(&callable))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<Args>(args)...);
        }) {}

  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

}  // namespace kascade
