// Runs a grid: CTAs one after another, the threads of each as calls, as fibers from a barrier on.
//
// A runner is a loop on a spare stack that takes threads in order and calls the kernel for each. A thread
// that meets a barrier keeps the runner's stack, and another runner goes on with the next thread; so a
// CTA without barriers costs calls and one stack. When every thread waits or has ended, the barrier is
// judged and its threads go on.
#pragma once

#include "common/message.h"
#include "host/fibers.h"
#include "host/order.h"
#include "host/vocabulary.h"

namespace pf::host {

struct Barrier {
  enum Kind { kBlock, kWarp };
  Kind kind;
  const char* file;
  int line;
};

inline constexpr unsigned kMaxThreads = 1024;
inline constexpr unsigned kWarpSize = 32;

inline bool same_site(const Barrier& a, const Barrier& b) {
  return a.kind == b.kind && a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

inline const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

class Grid {
 public:
  Grid(dim3 grid, dim3 block, void (*call)(const void*), const void* closure, pf_message* message)
      : grid_(grid), block_(block), call_(call), closure_(closure), message_(message) {}

  int run() {
    gridDim = grid_;
    blockDim = block_;
    thread_count_ = block_.x * block_.y * block_.z;
    const Order threads(order_kind, order_seed, thread_count_);
    for (unsigned turn = 0; turn < thread_count_; ++turn) {
      const auto thread = static_cast<unsigned>(threads.at(turn));
      order_[turn] = thread;
      index_[thread] = {thread % block_.x, thread / block_.x % block_.y, thread / block_.x / block_.y};
    }
    const uint64_t ctas = uint64_t{grid_.x} * grid_.y * grid_.z;
    const Order order(order_kind, order_seed, ctas);
    for (uint64_t turn = 0; turn < ctas && status_ == PF_OK; ++turn) {
      const uint64_t cta = order.at(turn);
      blockIdx = {static_cast<unsigned>(cta % grid_.x), static_cast<unsigned>(cta / grid_.x % grid_.y),
                  static_cast<unsigned>(cta / grid_.x / grid_.y)};
      run_cta();
    }
    return status_;
  }

  /// On a thread's stack.
  void wait(const Barrier& barrier) {
    Thread& thread = threads_[running_];
    thread.stack = stack_;
    thread.barrier = barrier;
    ++waiting_;
    parked_ = true;
    leave(thread.stack, false);
  }

  /// The largest value that a thread of the warp brings. On a thread's stack. Values of one exchange stay
  /// until the next but one, which no thread begins before all have left the first.
  unsigned warp_max(unsigned mask, unsigned value, const Barrier& barrier) {
    const unsigned first = running_ / kWarpSize * kWarpSize;
    const unsigned end = first + kWarpSize < thread_count_ ? first + kWarpSize : thread_count_;
    if (mask != ~0u || end - first != kWarpSize) {
      if (status_ == PF_OK) {
        status_ = PF_BARRIER_FAULT;
        say(message_, "a warp of {} threads exchanges by mask {} at {}:{}; only whole warps are emulated",
            end - first, mask, base_name(barrier.file), barrier.line);
      }
      return value;
    }
    Thread& thread = threads_[running_];
    const unsigned turn = thread.exchanges++ % 2;
    thread.exchanged[turn] = value;
    wait(barrier);
    unsigned largest = 0;
    for (unsigned lane = first; lane < end; ++lane) {
      if (threads_[lane].exchanged[turn] > largest) largest = threads_[lane].exchanged[turn];
    }
    return largest;
  }

  /// A runner, on its stack.
  void take_threads() {
    entered();
    while (next_ < thread_count_) call(order_[next_++]);
    leave(stack_, true);
  }

  /// What a GPU would do by itself: the launch fails, if only when it is over.
  void fail(const char* kind, int size_bytes, int buffer, int64_t offset_bytes, const char* file, int line) {
    if (status_ != PF_OK) return;
    status_ = PF_LAUNCH_FAILED;
    say(message_,
        "misaligned address: {} of {} bytes at byte {} of buffer {}, {}:{}, block ({},{},{}) "
        "thread ({},{},{})",
        kind, size_bytes, offset_bytes, buffer, base_name(file), line, blockIdx.x, blockIdx.y, blockIdx.z,
        threadIdx.x, threadIdx.y, threadIdx.z);
  }

 private:
  struct Thread {
    Stack* stack;  // null unless it waits
    Barrier barrier;
    bool ended;
    unsigned exchanges;
    unsigned exchanged[2];
  };

  void call(unsigned thread) {
    running_ = thread;
    threadIdx = index_[thread];
    call_(closure_);
    // The thread may have waited meanwhile, and others run.
    threads_[running_].ended = true;
  }

  void run_cta() {
    for (unsigned thread = 0; thread < thread_count_; ++thread) threads_[thread] = {};
    next_ = 0;
    waiting_ = 0;
    while (next_ < thread_count_) {
      start(take_stack());
      if (warps_go_ahead_ && !let_warp_go_ahead(running_ / kWarpSize)) return abandon_all();
    }
    while (waiting_ > 0) {
      if (!judge_barriers() || !resume_released()) return abandon_all();
    }
  }

  // Threads of other warps may not even have begun: a warp waits for nobody else at its own barriers.
  bool let_warp_go_ahead(unsigned warp) {
    const unsigned first = warp * kWarpSize;
    const unsigned end = first + kWarpSize < thread_count_ ? first + kWarpSize : thread_count_;
    for (;;) {
      unsigned waits = end;
      for (unsigned thread = first; thread < end; ++thread) {
        const Thread& one = threads_[thread];
        if (one.stack == nullptr && !one.ended) return true;  // has not begun
        if (one.stack != nullptr && one.barrier.kind == Barrier::kWarp) waits = thread;
      }
      if (waits == end) return true;
      if (!agree(first, end, waits)) return false;
      resume_warp(warp);
    }
  }

  // False, with a message, if a warp that goes ahead comes to a barrier that it can never pass.
  bool resume_released() {
    for (unsigned turn = 0; turn < thread_count_; ++turn) {
      const unsigned warp = order_[turn] / kWarpSize;
      if (!released_[warp]) continue;
      if (!warps_go_ahead_) {
        resume_thread(order_[turn]);
        continue;
      }
      released_[warp] = false;
      resume_warp(warp);
      if (!let_warp_go_ahead(warp)) return false;
    }
    return true;
  }

  void resume_warp(unsigned warp) {
    for (unsigned turn = 0; turn < thread_count_; ++turn) {
      if (order_[turn] / kWarpSize == warp) resume_thread(order_[turn]);
    }
  }

  void resume_thread(unsigned number) {
    Thread& thread = threads_[number];
    if (thread.stack == nullptr) return;
    Stack* stack = thread.stack;
    thread.stack = nullptr;
    --waiting_;
    running_ = number;
    threadIdx = index_[number];
    resume(stack);
  }

  void abandon_all() {
    for (unsigned thread = 0; thread < thread_count_; ++thread) {
      if (threads_[thread].stack != nullptr) abandon(threads_[thread].stack);
    }
  }

  void start(Stack* stack);

  void resume(Stack* stack) {
    stack_ = stack;
    parked_ = false;
    enter(stack);
    if (!parked_) give_back(stack);
  }

  // Decides which warps go on. False, with a message, if a barrier can never be passed.
  bool judge_barriers() {
    bool any_warp_barrier = false;
    const unsigned warps = (thread_count_ + kWarpSize - 1) / kWarpSize;
    for (unsigned warp = 0; warp < warps; ++warp) {
      const unsigned first = warp * kWarpSize;
      const unsigned end = first + kWarpSize < thread_count_ ? first + kWarpSize : thread_count_;
      released_[warp] = false;
      for (unsigned thread = first; thread < end; ++thread) {
        if (threads_[thread].stack != nullptr && threads_[thread].barrier.kind == Barrier::kWarp) {
          if (!agree(first, end, thread)) return false;
          released_[warp] = any_warp_barrier = true;
          break;
        }
      }
    }
    if (any_warp_barrier) return true;
    unsigned waits = 0;
    while (threads_[waits].stack == nullptr) ++waits;
    if (!agree(0, thread_count_, waits)) return false;
    for (unsigned warp = 0; warp < warps; ++warp) released_[warp] = true;
    return true;
  }

  bool agree(unsigned first, unsigned end, unsigned waits) {
    const Barrier& barrier = threads_[waits].barrier;
    const uint3 here = index_[waits];
    for (unsigned thread = first; thread < end; ++thread) {
      const uint3 there = index_[thread];
      if (threads_[thread].ended) {
        status_ = PF_BARRIER_FAULT;
        say(message_,
            "barrier not reached by every thread: in block ({},{},{}) thread ({},{},{}) waits at {}:{}, "
            "thread ({},{},{}) has ended",
            blockIdx.x, blockIdx.y, blockIdx.z, here.x, here.y, here.z, base_name(barrier.file), barrier.line,
            there.x, there.y, there.z);
        return false;
      }
      const Barrier& other = threads_[thread].barrier;
      if (!same_site(barrier, other)) {
        status_ = PF_BARRIER_FAULT;
        say(message_,
            "divergent barrier: in block ({},{},{}) thread ({},{},{}) waits at {}:{}, thread ({},{},{}) "
            "waits at {}:{}",
            blockIdx.x, blockIdx.y, blockIdx.z, here.x, here.y, here.z, base_name(barrier.file), barrier.line,
            there.x, there.y, there.z, base_name(other.file), other.line);
        return false;
      }
    }
    return true;
  }

  dim3 grid_;
  dim3 block_;
  void (*call_)(const void*);
  const void* closure_;
  pf_message* message_;
  int status_ = PF_OK;

  // In half of the orders warps come as far as they can, in the others side by side.
  const bool warps_go_ahead_ = order_kind == PF_ORDER_REVERSE || order_kind == PF_ORDER_SHUFFLED;
  unsigned thread_count_ = 0;
  unsigned order_[kMaxThreads];
  uint3 index_[kMaxThreads];
  Thread threads_[kMaxThreads];
  bool released_[kMaxThreads / kWarpSize];
  unsigned next_ = 0;     // turn of the next thread that has not begun
  unsigned waiting_ = 0;  // threads at barriers
  unsigned running_ = 0;
  Stack* stack_ = nullptr;  // the one that runs
  bool parked_ = false;     // whether it left because its thread waits
};

inline Grid* active_grid = nullptr;

inline void runner() { active_grid->take_threads(); }

inline void Grid::start(Stack* stack) {
  prepare(stack, runner);
  resume(stack);
}

inline void wait_at(const Barrier& barrier) { active_grid->wait(barrier); }

inline unsigned warp_max(unsigned mask, unsigned value, const Barrier& barrier) {
  return active_grid->warp_max(mask, value, barrier);
}

inline void misaligned(const char* kind, int size_bytes, int buffer, int64_t offset_bytes, const char* file,
                       int line) {
  active_grid->fail(kind, size_bytes, buffer, offset_bytes, file, line);
}

// ---- CUDA's own limits ------------------------------------------------------------------------------

inline bool within(const char* what, const char* axis, uint64_t value, uint64_t most, pf_message* message) {
  if (value == 0) {
    say(message, "invalid configuration argument: {}{} = 0 is below 1", what, axis);
    return false;
  }
  if (value > most) {
    say(message, "invalid configuration argument: {}{} = {} is above {}", what, axis, value, most);
    return false;
  }
  return true;
}

inline bool launchable(dim3 grid, dim3 block, int64_t dynamic_shared_bytes, bool shared_opt_in,
                       pf_message* message) {
  if (!(within("grid", ".x", grid.x, 2147483647, message) && within("grid", ".y", grid.y, 65535, message) &&
        within("grid", ".z", grid.z, 65535, message) && within("block", ".x", block.x, 1024, message) &&
        within("block", ".y", block.y, 1024, message) && within("block", ".z", block.z, 64, message) &&
        within("threads per block", "", uint64_t{block.x} * block.y * block.z, kMaxThreads, message))) {
    return false;
  }
  const int64_t most = (shared_opt_in ? 227 : 48) * 1024;
  if (dynamic_shared_bytes < 0 || dynamic_shared_bytes > most) {
    say(message, "invalid argument: {} bytes of dynamic shared memory are not within 0..{}{}",
        dynamic_shared_bytes, most, shared_opt_in ? "" : " (more needs an opt-in)");
    return false;
  }
  return true;
}

}  // namespace pf::host
