// Makes a CUDA handler of an op: enqueues the engine's work on the stream that XLA passes in.
#pragma once

#include "dropless/cuda.h"
#include "dropless/sm_limit.h"
#include "ffi/common.h"

namespace dropless::binding {

// The handler of `Op` (see common.h); `engine(args, workspace, stream)` does the work.
template <class Op, class Engine>
auto cuda_handler(const char* name, Engine engine) {
  return [name, engine](cuda::Stream stream, auto... arguments) -> ffi::Error {
    return guarded(name, [&]() -> Status {
      Decoder decoder(name);
      const auto args = Op::decode(decoder, arguments...);
      if (!decoder.status().ok()) return decoder.status();
      const cuda::SmLimit limit(decoder.num_sms());
      return engine(args, decoder.workspace(), stream);
    });
  };
}

}  // namespace dropless::binding

// Defines and exports the CUDA target of `op`, declared by `Op`, run by dropless::cuda::op. The
// trait promises what dropless/cuda.h does: every call enqueues the same work, so that XLA may
// capture it.
#define DROPLESS_CUDA_HANDLER(op, Op)                                                            \
  DROPLESS_EXPORT XLA_FFI_Error* DROPLESS_TARGET(op)(XLA_FFI_CallFrame * call_frame) {           \
    static auto* handler =                                                                       \
        Op::bind(                                                                                \
            ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::PlatformStream<::dropless::cuda::Stream>>()) \
            .To(::dropless::binding::cuda_handler<Op>(                                           \
                    #op,                                                                         \
                    [](const auto& args, ::dropless::Tensor workspace,                           \
                       ::dropless::cuda::Stream stream) {                                        \
                      return ::dropless::cuda::op(args, workspace, stream);                      \
                    }),                                                                          \
                {::xla::ffi::Traits::kCmdBufferCompatible})                                      \
            .release();                                                                          \
    return handler->Call(call_frame);                                                            \
  }
