// Where exceptions end: the entry points of the CPU backend and of the reference are function try
// blocks that return this.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "dropless/status.h"

namespace dropless {

// The exception being handled, as the status of operation `op`.
inline Status exception_status(const char* op) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, std::string(op) + ": out of memory");
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, std::string(op) + ": " + error.what());
  } catch (...) {
    return Status(StatusCode::kInternal, std::string(op) + ": an exception of an unknown type");
  }
}

}  // namespace dropless
