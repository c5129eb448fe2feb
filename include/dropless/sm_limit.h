// Keeping the GPU's grouped products to some of its multiprocessors.
#pragma once

namespace dropless::cuda {

// While it lives, products that this thread launches take at most `sms` multiprocessors, so that
// collectives which overlap with them find the others free; 0: all there are. Products run on
// persistent blocks, one or a few a multiprocessor, that share their tiles out among themselves, so
// the results have the same bits. Routing and row moves are short and are not limited.
class SmLimit {
 public:
  explicit SmLimit(int sms);
  ~SmLimit();
  SmLimit(const SmLimit&) = delete;
  SmLimit& operator=(const SmLimit&) = delete;

 private:
  int outer_;
};

}  // namespace dropless::cuda
