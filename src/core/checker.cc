#include "core/checker.h"

#include <cctype>
#include <cstdlib>

namespace dropless {
namespace {

bool is_number(const char* letter) {
  return std::isdigit(static_cast<unsigned char>(letter[0])) != 0;
}

}  // namespace

std::string describe(const ConstTensor& t) {
  if (!t.given()) return "nothing";
  std::string text = std::string(name_of(t.dtype)) + " [";
  for (int i = 0; i < t.rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(t.dims[i]);
  }
  return text + "]";
}

const int64_t* Checker::find(const std::string& letter) const {
  for (const auto& [name, value] : letters_) {
    if (name == letter) return &value;
  }
  return nullptr;
}

int64_t Checker::value(const char* letter) const {
  const int64_t* found = find(letter);
  return found == nullptr ? 0 : *found;
}

Checker& Checker::let(const char* letter, int64_t value) {
  if (find(letter) == nullptr) letters_.emplace_back(letter, value);
  return *this;
}

std::string Checker::describe(DTypes dtypes, Shape shape) const {
  std::string text;
  for (const DType dtype : dtypes) {
    if (!text.empty()) text += " or ";
    text += name_of(dtype);
  }
  text += " [";
  std::string known;
  bool first = true;
  for (const char* letter : shape) {
    if (!first) text += ", ";
    first = false;
    text += letter;
    if (is_number(letter)) continue;
    if (const int64_t* bound = find(letter)) {
      known +=
          (known.empty() ? " with " : ", ") + std::string(letter) + "=" + std::to_string(*bound);
    }
  }
  return text + "]" + known;
}

Checker& Checker::require(const char* name, const ConstTensor& t, DTypes dtypes, Shape shape) {
  if (!ok()) return *this;
  bool fits = t.rank == static_cast<int>(shape.size());
  bool dtype_fits = false;
  for (const DType dtype : dtypes) dtype_fits = dtype_fits || dtype == t.dtype;
  fits = fits && dtype_fits;
  int axis = 0;
  for (const char* letter : shape) {
    if (!fits) break;
    const int64_t dim = t.dims[axis++];
    if (is_number(letter)) {
      fits = dim == std::strtoll(letter, nullptr, 10);
    } else if (const int64_t* bound = find(letter)) {
      fits = dim == *bound;
    } else {
      fits = dim >= 0;
    }
  }
  if (!fits) {
    return that(false, "argument '" + std::string(name) + "' must be " + describe(dtypes, shape) +
                           ", got " + dropless::describe(t));
  }
  axis = 0;
  for (const char* letter : shape) {
    if (!is_number(letter)) let(letter, t.dims[axis]);
    ++axis;
  }
  return that(t.data != nullptr || t.size() == 0, "argument '" + std::string(name) + "' (" +
                                                      dropless::describe(t) +
                                                      ") must have data, got a null pointer");
}

Checker& Checker::optional(const char* name, const ConstTensor& t, DTypes dtypes, Shape shape) {
  return t.given() ? require(name, t, dtypes, shape) : *this;
}

Checker& Checker::absent(const char* name, const ConstTensor& t, const char* reason) {
  if (!ok() || !t.given()) return *this;
  return that(false, "argument '" + std::string(name) + "' must be left out, since it is " +
                         reason + "; got " + dropless::describe(t));
}

Checker& Checker::that(bool condition, const std::string& message) {
  if (ok() && !condition) failure_ = op_ + ": " + message;
  return *this;
}

void check_scale_rounding(Checker& c, ScaleRounding rounding) {
  c.that(rounding == ScaleRounding::kFp32 || rounding == ScaleRounding::kPow2,
         "'scale_rounding' must be 0 (fp32) or 1 (pow2), got " +
             std::to_string(static_cast<int32_t>(rounding)));
}

}  // namespace dropless
