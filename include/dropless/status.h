// Errors are values: no operation exits or throws. Memory that is not there is kResourceExhausted
// in the CPU backend and the reference; functions that only check arguments may throw
// std::bad_alloc.
#pragma once

#include <string>
#include <utility>

namespace dropless {

enum class StatusCode { kOk, kInvalidArgument, kUnimplemented, kResourceExhausted, kInternal };

class [[nodiscard]] Status {
 public:
  Status() = default;
  // `message` names the argument, what was expected and what came.
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace dropless
