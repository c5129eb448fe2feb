// What every XLA handler needs: buffers to tensor views, and Status to ffi::Error.
//
// An op is declared once for all platforms, as a struct with
//   bind(binding):  adds the operands, results and attributes, in the order of docs/architecture.md
//   decode(d, ...): turns them into the engine's Args; values are checked there, by check(args)
// and <family>_cpu.cc / <family>_cuda.cc instantiate it.
#pragma once

#include <string>

#include "core/exception_status.h"
#include "dropless/status.h"
#include "dropless/types.h"
#include "ffi/contract.h"
#include "xla/ffi/api/ffi.h"

namespace dropless::binding {

namespace ffi = xla::ffi;
using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error to_error(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return ffi::Error::Success();
    case StatusCode::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message());
    case StatusCode::kUnimplemented:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, status.message());
    case StatusCode::kResourceExhausted:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.message());
    case StatusCode::kInternal:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.message());
}

// Views buffers as tensors and keeps the first thing that is wrong with one of them.
class Decoder {
 public:
  // `op` and the names given to the members below appear in error messages.
  explicit Decoder(const char* op) : op_(op) {}

  ConstTensor in(const char* name, const In& buffer) { return view(name, buffer); }
  Tensor out(const char* name, Out& buffer) { return view(name, *buffer); }

  // An absent operand or result arrives with shape (0,) and becomes a tensor that is not given().
  ConstTensor optional_in(const char* name, const In& buffer) {
    return absent(buffer) ? ConstTensor{} : view(name, buffer);
  }
  Tensor optional_out(const char* name, Out& buffer) {
    return absent(*buffer) ? Tensor{} : view(name, *buffer);
  }

  // Keeps the trailing workspace result for the engine; the CPU backend has no use for it.
  void workspace(Out& buffer) { workspace_ = out("workspace", buffer); }
  const Tensor& workspace() const { return workspace_; }

  // Keeps how many multiprocessors a product may take, 0: all; the CPU backend has no use for it.
  void num_sms(int32_t sms) {
    if (sms < 0) fail("num_sms must be at least 0, but is " + std::to_string(sms));
    num_sms_ = sms;
  }
  int32_t num_sms() const { return num_sms_; }

  void fail(const std::string& message) {
    if (status_.ok()) {
      status_ = Status(StatusCode::kInvalidArgument, std::string(op_) + ": " + message);
    }
  }

  const Status& status() const { return status_; }

 private:
  static bool absent(const In& buffer) {
    return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0;
  }

  Tensor view(const char* name, const In& buffer) {
    Tensor tensor;
    const ffi::Span<const int64_t> dims = buffer.dimensions();
    if (dims.size() < 1 || dims.size() > kMaxRank) {
      fail(std::string(name) + " must have 1 to " + std::to_string(kMaxRank) + " axes, but has " +
           std::to_string(dims.size()));
      return tensor;
    }
    switch (buffer.element_type()) {
      case ffi::DataType::F32:
        tensor.dtype = DType::kF32;
        break;
      case ffi::DataType::BF16:
        tensor.dtype = DType::kBF16;
        break;
      case ffi::DataType::F8E4M3FN:
        tensor.dtype = DType::kF8E4M3;
        break;
      case ffi::DataType::S32:
        tensor.dtype = DType::kI32;
        break;
      case ffi::DataType::U8:
        tensor.dtype = DType::kU8;
        break;
      default:
        fail(
            std::string(name) +
            " must be float32, bfloat16, float8_e4m3fn, int32 or uint8, but has XLA element type " +
            std::to_string(static_cast<int>(buffer.element_type())));
        return tensor;
    }
    tensor.data = buffer.untyped_data();
    tensor.rank = static_cast<int>(dims.size());
    for (int i = 0; i < tensor.rank; ++i) tensor.dims[i] = dims[i];
    return tensor;
  }

  const char* op_;
  Status status_;
  Tensor workspace_;
  int32_t num_sms_ = 0;
};

// Runs `body`, a function that returns Status; the only place where a Status becomes an error of
// XLA's, and with it whatever is thrown outside the engine's operations.
template <class Body>
ffi::Error guarded(const char* op, Body&& body) {
  try {
    return to_error(body());
  } catch (...) {
    return to_error(exception_status(op));
  }
}

}  // namespace dropless::binding
