#include "cpu/gemm_driver.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "core/float_environment.h"
#include "cpu/prefetch.h"
#include "cpu/scratch.h"
#include "dropless/types.h"

namespace dropless::cpu {
namespace {

// Packed A of one wave, where A is packed beforehand. Large enough that B is packed once for
// thousands of rows, small enough to stay in a server's last-level cache.
constexpr int64_t kWaveBytes = int64_t{32} << 20;
// Packed B of an item, half of a second-level cache, and the columns it may have over all
// n-segments: with more of them a row of packed A is read from memory less often, but the strip of
// C grows.
constexpr int64_t kPanelBytes = int64_t{1} << 20;
constexpr int64_t kMaxPanelColumns = 512;
// Rows of an item whose C must wait between K blocks, in the other half of that cache.
constexpr int64_t kItemRows = 512;
// Panels of A packed together, so that a row is read by at least 512 contiguous bytes where it lies
// across the panels.
constexpr int64_t kPanelsPerJob = 8;
// Floats between the end of a row of C and the next: keeps the rows of a tile out of one another's
// cache sets.
constexpr int64_t kRowPadding = 16;
// With several threads: a run of items is about 1/8 of a thread's share of the work, for balance,
// but costs at least 2^20 multiply-adds, some 10 microseconds, to be worth handing over. Rows are
// split, which packs B again, only where a single item is more than 1/3 of a share, and never below
// 256 rows.
constexpr int64_t kRunsPerThread = 8;
constexpr int64_t kItemsPerThread = 3;
constexpr int64_t kMinRunCost = int64_t{1} << 20;
constexpr int64_t kMinItemRows = 256;

// A range of one group's rows, inside a wave.
struct Part {
  GemmGroup group;
  std::vector<KBlock> const* blocks;
  int64_t depth;  // packed depth over all blocks
  int64_t m_begin, m_end;
  int64_t a_offset;      // bytes into the wave's packed A
  int64_t panel_bytes;   // of one packed panel of A, scales included
  int64_t scale_offset;  // of a panel's scales, from its start
  int64_t longest;       // packed depth of the longest block
  int64_t columns;       // of an item's n-panel, in one n-segment
};

struct Item {
  int part;
  int64_t m_begin, m_end;
  int64_t n0, cols;
};

int64_t round_up(int64_t x, int64_t to) { return ceil_div(x, to) * to; }

// Cuts each segment of depth k into nearly equal blocks.
std::vector<KBlock> k_blocks(const GemmProblem& problem, const GemmKernel& kernel, int64_t k) {
  std::vector<KBlock> blocks;
  if (k == 0) return blocks;
  const int64_t grain = problem.scaled ? kScaleBlock : kernel.k_step;
  const int64_t limit = std::max(grain, kernel.k_block / grain * grain);
  const int64_t length = round_up(ceil_div(k, ceil_div(k, limit)), grain);
  int64_t depth = 0, scales = 0;
  for (int segment = 0; segment < problem.k_segments; ++segment) {
    for (int64_t begin = 0; begin < k; begin += length) {
      const int64_t count = std::min(length, k - begin);
      const int64_t packed = round_up(count, kernel.k_step);
      blocks.push_back({segment, begin, count, depth, packed, scales});
      depth += packed;
      scales += ceil_div(count, kScaleBlock);
    }
  }
  return blocks;
}

class Run {
 public:
  Run(const GemmProblem& problem, const GemmKernel& kernel, const RowOps& rows, Executor& executor)
      : p_(problem), kernel_(kernel), rows_(rows), executor_(executor) {}

  void run() {
    if (p_.n == 0) return;
    int64_t a_bytes = 0;
    for (const GemmGroup& group : p_.groups) {
      if (group.m == 0) continue;
      for (int64_t m = 0; m < group.m;) {
        Part part = make_part(group);
        int64_t rows = group.m;
        if (p_.scaled) {
          const int64_t room = (kWaveBytes - a_bytes) / std::max<int64_t>(part.panel_bytes, 1);
          if (room < 1 && !parts_.empty()) {
            run_wave(a_bytes);
            a_bytes = 0;
            continue;
          }
          rows = std::min(group.m - m, std::max<int64_t>(room, 1) * kernel_.mr);
        }
        part.m_begin = m;
        part.m_end = m += rows;
        part.a_offset = a_bytes;
        if (p_.scaled) a_bytes += ceil_div(rows, kernel_.mr) * part.panel_bytes;
        parts_.push_back(part);
      }
    }
    if (!parts_.empty()) run_wave(a_bytes);
  }

 private:
  Part make_part(const GemmGroup& group) {
    if (blocks_.empty() || blocks_.back()->k != group.k) {
      blocks_.push_back(std::make_unique<Blocks>(Blocks{group.k, k_blocks(p_, kernel_, group.k)}));
    }
    Part part{};
    part.group = group;
    part.blocks = &blocks_.back()->list;
    int64_t scales = 0;
    for (const KBlock& b : *part.blocks) {
      part.depth += b.packed_length;
      scales += ceil_div(b.length, kScaleBlock);
      part.longest = std::max(part.longest, b.packed_length);
    }
    const int64_t fitting =
        kPanelBytes / kernel_.element_bytes / std::max<int64_t>(part.longest, 1);
    part.columns = std::min(fitting, kMaxPanelColumns) / p_.n_segments / kScaleBlock * kScaleBlock;
    part.columns = std::min(round_up(p_.n, kernel_.nr), std::max(part.columns, kScaleBlock));
    part.scale_offset = part.depth * kernel_.mr * kernel_.element_bytes;
    part.panel_bytes = part.scale_offset + (p_.scaled ? round_up(scales * kernel_.mr * 4, 64) : 0);
    part.panel_bytes = round_up(part.panel_bytes, 64);
    return part;
  }

  void run_wave(int64_t a_bytes) {
    if (p_.scaled) {
      static thread_local Scratch wave_scratch;  // <= kWaveBytes, or one panel of A if that is more
      packed_a_ = wave_scratch.reserve(a_bytes);
      pack_wave();
    }
    make_items();
    parallel_items(executor_, static_cast<int64_t>(item_begin_.size()) - 1, [this](int64_t i) {
      static thread_local char tile_state[64];
      if (kernel_.begin != nullptr) kernel_.begin(tile_state);
      for (int64_t j = item_begin_[i]; j < item_begin_[i + 1]; ++j) run_item(items_[j]);
      if (kernel_.end != nullptr) kernel_.end(tile_state);
    });
    parts_.clear();
  }

  void pack_wave() {
    struct Job {
      int part;
      int64_t begin, end;  // panels
    };
    std::vector<Job> jobs;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const int64_t panels = ceil_div(parts_[i].m_end - parts_[i].m_begin, kernel_.mr);
      for (int64_t b = 0; b < panels; b += kPanelsPerJob) {
        jobs.push_back({static_cast<int>(i), b, std::min(panels, b + kPanelsPerJob)});
      }
    }
    parallel_items(executor_, static_cast<int64_t>(jobs.size()), [&](int64_t j) {
      const Part& part = parts_[jobs[j].part];
      char* data = packed_a_ + part.a_offset + jobs[j].begin * part.panel_bytes;
      const int64_t m0 = part.m_begin + jobs[j].begin * kernel_.mr;
      const int64_t count = std::min(part.m_end, part.m_begin + jobs[j].end * kernel_.mr) - m0;
      for (const KBlock& block : *part.blocks) {
        p_.pack_a(kernel_, part.group, m0, count, block,
                  data + block.packed_begin * kernel_.mr * kernel_.element_bytes,
                  data + part.scale_offset + block.scale_begin * kernel_.mr * 4, part.panel_bytes);
      }
    });
  }

  // Cuts the wave into items and these into runs for one thread each.
  void make_items() {
    int64_t total = 0;
    for (const Part& part : parts_) total += cost(part, part.m_end - part.m_begin, p_.n);
    const int64_t threads = executor_.concurrency();
    const int64_t run =
        threads <= 1 ? total : std::max(kMinRunCost, total / (threads * kRunsPerThread));
    const int64_t largest = threads <= 1 ? total : total / (threads * kItemsPerThread);
    items_.clear();
    item_begin_.assign(1, 0);
    int64_t open = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      const int64_t rows = part.m_end - part.m_begin;
      int64_t step = part.blocks->size() > 1 ? std::min(rows, kItemRows) : rows;
      const int64_t pieces =
          ceil_div(cost(part, rows, part.columns), std::max<int64_t>(largest, 1));
      step = std::min(step, std::max(ceil_div(rows, pieces), kMinItemRows));
      step = round_up(ceil_div(rows, ceil_div(rows, step)), kernel_.mr);
      for (int64_t n0 = 0; n0 < p_.n; n0 += part.columns) {
        const int64_t cols = std::min(part.columns, p_.n - n0);
        for (int64_t m = part.m_begin; m < part.m_end; m += step) {
          const int64_t m_end = std::min(part.m_end, m + step);
          items_.push_back({static_cast<int>(i), m, m_end, n0, cols});
          open += cost(part, m_end - m, cols);
          if (open >= run) {
            item_begin_.push_back(static_cast<int64_t>(items_.size()));
            open = 0;
          }
        }
      }
    }
    if (item_begin_.back() != static_cast<int64_t>(items_.size())) {
      item_begin_.push_back(static_cast<int64_t>(items_.size()));
    }
  }

  // In multiply-adds. Packing an element of B costs about as much as using it for 16 rows.
  int64_t cost(const Part& part, int64_t rows, int64_t cols) const {
    return (rows + 16) * cols * p_.n_segments * (part.depth + 16);
  }

  void run_item(const Item& item) {
    const Part& part = parts_[item.part];
    const int64_t packed_cols = round_up(item.cols, kernel_.nr);  // of one n-segment
    const int64_t ldc = packed_cols * p_.n_segments + kRowPadding;
    const bool keep_c = part.blocks->size() > 1;
    const int64_t c_rows = keep_c ? round_up(item.m_end - item.m_begin, kernel_.mr) : kernel_.mr;

    static thread_local Scratch c_scratch;  // <= (kItemRows + mr) * (kMaxPanelColumns + 16) floats
    float* c = reinterpret_cast<float*>(c_scratch.reserve(c_rows * ldc * 4));
    const int64_t b_panels = packed_cols / kernel_.nr * p_.n_segments;
    const int64_t b_bytes = part.longest * kernel_.nr * kernel_.element_bytes;
    static thread_local Scratch
        b_scratch;  // <= kPanelBytes, or 128 columns a segment, and their scales
    const int64_t scale_stride = packed_cols * p_.n_segments;
    const int64_t scale_bytes =
        p_.scaled ? ceil_div(part.longest, kScaleBlock) * scale_stride * 4 : 0;
    char* b = b_scratch.reserve(b_bytes * b_panels + scale_bytes);
    float* b_scales = reinterpret_cast<float*>(b + b_bytes * b_panels);

    const size_t steps = std::max<size_t>(part.blocks->size(), 1);
    for (size_t step = 0; step < steps; ++step) {
      const bool last = step + 1 == steps;
      const KBlock* block = part.blocks->empty() ? nullptr : &(*part.blocks)[step];
      if (block != nullptr) {
        for (int s = 0; s < p_.n_segments; ++s) {
          p_.pack_b(kernel_, part.group, s, item.n0, item.cols, *block,
                    b + s * (b_panels / p_.n_segments) * b_bytes, b_bytes,
                    b_scales + s * packed_cols, scale_stride);
        }
      }
      for (int64_t m = item.m_begin; m < item.m_end; m += kernel_.mr) {
        const int count = static_cast<int>(std::min<int64_t>(kernel_.mr, item.m_end - m));
        float* strip_c = keep_c ? c + (m - item.m_begin) * ldc : c;
        const GemmStrip strip = {part.group.index, m,       count, item.n0,
                                 item.cols,        strip_c, ldc,   packed_cols};
        if (block == nullptr) {
          std::memset(strip_c, 0, kernel_.mr * ldc * 4);
        } else {
          multiply_strip(part, item, *block, strip, b, b_panels, b_bytes, b_scales, scale_stride,
                         step > 0, last);
        }
        if (last) p_.store(strip);
      }
    }
  }

  // One panel of A times all panels of B. Between the tiles the next panel of A and, before a
  // store, the lines of the result are asked for.
  void multiply_strip(const Part& part, const Item& item, const KBlock& block,
                      const GemmStrip& strip, const char* b, int64_t b_panels, int64_t b_bytes,
                      const float* b_scales, int64_t scale_stride, bool accumulate, bool last) {
    const float* a_scales = nullptr;
    const char* a = packed_a(part, item, block, strip, &a_scales);
    // The panels of A that are packed next, and which strip of those at hand this is.
    const int64_t together = p_.strips_together * kernel_.mr;
    const int64_t place = (strip.m0 - item.m_begin) % together;
    const int64_t next = strip.m0 - place + together;
    const int64_t next_rows = std::min(together, item.m_end - next);
    const int64_t first_share = place / kernel_.mr * b_panels;
    const int64_t per_segment = b_panels / p_.n_segments;
    for (int64_t j = 0; j < b_panels; ++j) {
      multiply(block, strip.rows, a, a_scales, b + j * b_bytes, b_scales + j * kernel_.nr,
               scale_stride, strip.c + j * kernel_.nr, strip.ldc, accumulate);
      if (!p_.scaled && next_rows > 0) {
        p_.prefetch_a(part.group, next, next_rows, block, first_share + j,
                      p_.strips_together * b_panels);
      }
      if (last && kernel_.prefetch_store) {
        const int64_t n = j % per_segment * kernel_.nr;
        p_.prefetch_store(strip, static_cast<int>(j / per_segment), n,
                          std::min<int64_t>(kernel_.nr, strip.cols - n));
      }
    }
  }

  const char* packed_a(const Part& part, const Item& item, const KBlock& block,
                       const GemmStrip& strip, const float** scales) {
    if (p_.scaled) {
      const char* panel =
          packed_a_ + part.a_offset + (strip.m0 - part.m_begin) / kernel_.mr * part.panel_bytes;
      *scales = reinterpret_cast<const float*>(panel + part.scale_offset) +
                block.scale_begin * kernel_.mr;
      return panel + block.packed_begin * kernel_.mr * kernel_.element_bytes;
    }
    static thread_local Scratch scratch;  // <= strips_together * mr * k_block elements
    const int64_t panel_bytes = part.longest * kernel_.mr * kernel_.element_bytes;
    char* panels = scratch.reserve(p_.strips_together * panel_bytes);
    const int64_t place = (strip.m0 - item.m_begin) / kernel_.mr % p_.strips_together;
    if (place == 0) {
      const int64_t rows = std::min(p_.strips_together * kernel_.mr, item.m_end - strip.m0);
      p_.pack_a(kernel_, part.group, strip.m0, rows, block, panels, nullptr, panel_bytes);
    }
    return panels + place * panel_bytes;
  }

  void multiply(const KBlock& block, int count, const char* a, const float* a_scales, const char* b,
                const float* b_scales, int64_t scale_stride, float* c, int64_t ldc,
                bool accumulate) {
    if (!p_.scaled) {
      kernel_.multiply(count, block.packed_length, a, b, c, ldc, accumulate);
      return;
    }
    if (!accumulate) {
      for (int i = 0; i < count; ++i) std::memset(c + i * ldc, 0, kernel_.nr * 4);
    }
    alignas(64) float product[kMaxMr * kMaxNr];
    for (int64_t k = 0; k < block.packed_length; k += kScaleBlock) {
      const int64_t depth = std::min(kScaleBlock, block.packed_length - k);
      kernel_.multiply(count, depth, a + k * kernel_.mr * kernel_.element_bytes,
                       b + k * kernel_.nr * kernel_.element_bytes, product, kernel_.nr, false);
      rows_.add_scaled(product, kernel_.nr, a_scales + k / kScaleBlock * kernel_.mr,
                       b_scales + k / kScaleBlock * scale_stride, count, kernel_.nr, c, ldc);
    }
  }

  static constexpr int kMaxMr = 32, kMaxNr = 64;  // of any kernel
  struct Blocks {
    int64_t k;
    std::vector<KBlock> list;
  };

  const GemmProblem& p_;
  const GemmKernel& kernel_;
  const RowOps& rows_;
  Executor& executor_;
  std::vector<std::unique_ptr<Blocks>> blocks_;
  std::vector<Part> parts_;  // of the wave
  char* packed_a_ = nullptr;
  std::vector<Item> items_;
  std::vector<int64_t> item_begin_;  // run i is items [item_begin_[i], item_begin_[i + 1])
};

}  // namespace

void run_gemm(const GemmProblem& problem, const GemmKernel& kernel, const RowOps& rows,
              Executor& executor) {
  Run(problem, kernel, rows, executor).run();
}

void parallel_items(Executor& executor, int64_t count, const std::function<void(int64_t)>& item) {
  if (count <= 0) return;
  executor.parallel_for(count, [&item](int64_t i) {
    const ScopedIeeeFloats ieee;
    item(i);
  });
}

}  // namespace dropless::cpu
