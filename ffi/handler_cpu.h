// Makes a CPU handler of an op: runs the engine on the thread pool that XLA passes in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/parallel_job.h"
#include "dropless/cpu_kernel.h"
#include "dropless/executor.h"
#include "ffi/common.h"

namespace dropless::binding {

// XLA's intra-op pool, shared by every device and every program of the process. It must never be
// blocked: the calling thread takes items itself and waits only for items that some thread has
// already begun, and a helper that the pool starts late finds nothing left and leaves.
class PoolExecutor final : public Executor {
 public:
  explicit PoolExecutor(ffi::ThreadPool& pool)
      : pool_(pool), concurrency_(static_cast<int>(std::max<int64_t>(1, pool.num_threads()))) {}

  int concurrency() const override { return concurrency_; }

  void parallel_for(int64_t count, const std::function<void(int64_t)>& item) override {
    const int64_t helpers = std::min<int64_t>(concurrency_, count) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < count; ++i) item(i);
      return;
    }
    const auto job = std::make_shared<ParallelJob>(count, item);
    for (int64_t i = 0; i < helpers; ++i) {
      pool_.Schedule([job] { job->run_items(); });
    }
    job->run_items();
    job->wait();
  }

 private:
  ffi::ThreadPool& pool_;
  const int concurrency_;
};

// The handler of `Op` (see common.h); `engine(args, executor)` does the work.
template <class Op, class Engine>
auto cpu_handler(const char* name, Engine engine) {
  return [name, engine](ffi::ThreadPool pool, auto... arguments) -> ffi::Error {
    return guarded(name, [&]() -> Status {
      Decoder decoder(name);
      const auto args = Op::decode(decoder, arguments...);
      if (!decoder.status().ok()) return decoder.status();
      if (Status status = cpu::kernel_status(); !status.ok()) return status;
      PoolExecutor executor(pool);
      return engine(args, executor);
    });
  };
}

}  // namespace dropless::binding

// Defines and exports the CPU target of `op`, declared by `Op`, run by dropless::cpu::op.
#define DROPLESS_CPU_HANDLER(op, Op)                                                       \
  DROPLESS_EXPORT XLA_FFI_Error* DROPLESS_TARGET(op)(XLA_FFI_CallFrame * call_frame) {     \
    static auto* handler = Op::bind(::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::ThreadPool>()) \
                               .To(::dropless::binding::cpu_handler<Op>(                   \
                                   #op,                                                    \
                                   [](const auto& args, ::dropless::Executor& executor) {  \
                                     return ::dropless::cpu::op(args, executor);           \
                                   }))                                                     \
                               .release();                                                 \
    return handler->Call(call_frame);                                                      \
  }
