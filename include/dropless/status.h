// Errors are values: no function of the public API exits, or throws anything but std::bad_alloc.
#pragma once

#include <string>
#include <utility>

namespace dropless {

enum class StatusCode { kOk, kInvalidArgument, kUnimplemented, kInternal };

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
