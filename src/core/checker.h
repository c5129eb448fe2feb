// Argument checks that speak: every failure names the argument, what was expected and what came.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "dropless/status.h"
#include "dropless/types.h"

namespace dropless {

// Collects the first failure of a list of expectations. A shape is a list of letters ("T", "H");
// a letter takes its value from the first tensor that uses it, later tensors must agree with it.
// A letter that starts with a digit is that number.
class Checker {
 public:
  using Shape = std::initializer_list<const char*>;
  using DTypes = std::initializer_list<DType>;

  explicit Checker(const char* op) : op_(op) {}

  // Gives a letter (or an expression such as "ceil(H/128)") its value.
  Checker& let(const char* letter, int64_t value);
  // The value of a letter, 0 if no tensor has used it yet.
  int64_t value(const char* letter) const;

  // The tensor must be given, with one of the dtypes and this shape.
  Checker& require(const char* name, const ConstTensor& t, DTypes dtypes, Shape shape);
  // As require, if the tensor is given at all.
  Checker& optional(const char* name, const ConstTensor& t, DTypes dtypes, Shape shape);
  // The tensor must not be given; `reason` says when it may be.
  Checker& absent(const char* name, const ConstTensor& t, const char* reason);
  // Any other condition; `message` names the argument, what was expected and what came.
  Checker& that(bool condition, const std::string& message);

  Status status() const {
    return failure_.empty() ? Status() : Status(StatusCode::kInvalidArgument, failure_);
  }
  bool ok() const { return failure_.empty(); }

 private:
  const int64_t* find(const std::string& letter) const;
  std::string describe(DTypes dtypes, Shape shape) const;

  std::string op_;
  std::string failure_;
  std::vector<std::pair<std::string, int64_t>> letters_;
};

// Of an enum that came from outside: it must be one of its values.
void check_scale_rounding(Checker& c, ScaleRounding rounding);

// "float32 [3, 4]", or "nothing" for a tensor that is not given.
std::string describe(const ConstTensor& t);

}  // namespace dropless
