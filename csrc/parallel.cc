// The thread pool behind parallel_for.
#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace topp {
namespace {

// XLA:CPU runs its threads with denormals flushed, which would change results near the underflow
// threshold.
class StandardFloatingPoint {
 public:
#if defined(__x86_64__)
  StandardFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~StandardFloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  StandardFloatingPoint() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~StandardFloatingPoint() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

struct Job {
  int64_t count, grain;
  RangeFunction f;
  void* context;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;

  bool exhausted() const { return next.load(std::memory_order_relaxed) >= count; }

  void work() {
    StandardFloatingPoint standard;
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      const int64_t end = std::min(begin + grain, count);
      f(context, begin, end);
      if (done.fetch_add(end - begin, std::memory_order_acq_rel) + (end - begin) == count) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load(std::memory_order_acquire) == count; });
  }
};

class Pool {
 public:
  void run(const std::shared_ptr<Job>& job, int helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (started_ < helpers) {
        std::thread([this] { serve(); }).detach();
        ++started_;
      }
      jobs_.push_back(job);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job->work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
    }
    job->wait();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      std::shared_ptr<Job> job;
      for (const auto& candidate : jobs_) {
        if (!candidate->exhausted()) {
          job = candidate;
          break;
        }
      }
      if (!job) {
        wake_.wait(lock);
        continue;
      }
      lock.unlock();
      job->work();
      job.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;
  int started_ = 0;
};

// Never destroyed: detached workers may outlive static destruction. A forked child has none of the
// parent's threads and perhaps a locked mutex, so it gets a fresh pool and leaves the old one
// alone.
std::atomic<Pool*> g_pool{nullptr};
std::atomic<int> g_threads{0};

Pool& pool() {
  static std::once_flag registered;
  std::call_once(registered,
                 [] { pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); }); });
  Pool* current = g_pool.load();
  if (current == nullptr) {
    Pool* fresh = new Pool;
    if (g_pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;  // another thread was first, and nothing has used this one
  }
  return *current;
}

int default_threads() {
  if (const char* text = std::getenv("JAX_TOPP_NUM_THREADS")) {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && value >= 1) return static_cast<int>(std::min(value, 1024L));
  }
#if defined(__linux__)
  cpu_set_t set;  // what this process may use, not what the machine has
  if (pthread_getaffinity_np(pthread_self(), sizeof set, &set) == 0)
    return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

int num_threads() {
  int n = g_threads.load();
  if (n == 0) {
    n = default_threads();
    g_threads.store(n);
  }
  return n;
}

void set_num_threads(int n) { g_threads.store(std::max(1, n)); }

void parallel_for(int64_t count, int64_t grain, RangeFunction f, void* context) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  const int64_t ranges = (count + grain - 1) / grain;
  const int helpers = static_cast<int>(std::min<int64_t>(num_threads(), ranges)) - 1;
  if (helpers <= 0) {
    StandardFloatingPoint standard;
    f(context, 0, count);
    return;
  }
  auto job = std::make_shared<Job>();
  job->count = count;
  job->grain = grain;
  job->f = f;
  job->context = context;
  pool().run(job, helpers);
}

}  // namespace topp
