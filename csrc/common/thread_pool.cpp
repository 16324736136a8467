#include "common/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace anybit {
namespace {

// To wake a thread takes 100 to 200 us. So it stays awake from one layer of a model to the next, or from its last piece
// to the next call: at first it asks again and again, then it lets others have the core in between.
constexpr auto SPIN = std::chrono::microseconds(30), LINGER = std::chrono::microseconds(150);

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Wait until `ready()` without sleeping, for LINGER at most.
template <typename F> bool spin_until(F ready) {
    const auto begun = std::chrono::steady_clock::now();
    for (;;) {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            pause();
        }
        const auto spent = std::chrono::steady_clock::now() - begun;
        if (spent > LINGER) return ready();
        if (spent > SPIN) std::this_thread::yield();
    }
}

// Keeps a sleeper from waking where its waker works, which Linux does while other processors idle (a virtual machine's
// look busy to it): they then share one processor for some milliseconds. Where somebody else says in between which
// processors the thread may run on, that holds.
class Elsewhere {
public:
#if defined(__linux__)
    // By the waker: `thread` is to run on another processor than this one, if it may run on others.
    void send(pthread_t thread) {
        const int here = sched_getcpu();
        cpu_set_t now;
        if (here < 0 || here >= CPU_SETSIZE || pthread_getaffinity_np(thread, sizeof now, &now) != 0) return;
        if (!sent_ || !CPU_EQUAL(&now, &others_)) allowed_ = now;
        others_ = allowed_;
        CPU_CLR(here, &others_);
        sent_ = CPU_COUNT(&others_) > 0 && pthread_setaffinity_np(thread, sizeof others_, &others_) == 0;
    }
    // By the woken thread: it may run where it might before.
    void arrive() {
        cpu_set_t now;
        if (sent_ && pthread_getaffinity_np(pthread_self(), sizeof now, &now) == 0 && CPU_EQUAL(&now, &others_))
            pthread_setaffinity_np(pthread_self(), sizeof allowed_, &allowed_);
        sent_ = false;
    }

private:
    cpu_set_t allowed_, others_; // before and since it was sent
    bool sent_ = false;
#else
    void send(pthread_t) {}
    void arrive() {}
#endif
};

// The caller of `run` works too and closes the job when no piece is left; it then waits only for workers that
// had entered. A worker that never got a core delays nobody.
class Pool {
public:
    // False where another thread uses the pool: nothing was done.
    bool run(int64_t n, int64_t grain, int threads, RangeFunction function, void* context, ReadyFunction ready) {
        std::unique_lock<std::mutex> user(user_, std::try_to_lock);
        if (!user.owns_lock()) return false;
        start_workers(threads - 1);
        n_ = n, grain_ = grain, function_ = function, context_ = context, ready_ = ready;
        helpers_ = std::min(threads - 1, static_cast<int>(workers_.size()));
        next_ = 0;
        const Open open(*this);
        for (int i = 0; i < helpers_; ++i) workers_[static_cast<size_t>(i)]->wake();
        work();
        return true;
    }

private:
    static constexpr int64_t CLOSED = int64_t(1) << 32;

    // A job that workers may enter. However its user leaves, none is inside afterwards.
    class Open {
    public:
        explicit Open(Pool& pool) : pool_(pool) {
            pool.inside_ = 0;
            ++pool.job_;
        }
        Open(const Open&) = delete;
        ~Open() {
            pool_.inside_ -= CLOSED;
            const auto empty = [this] { return pool_.inside_ == -CLOSED; };
            if (!spin_until(empty))
                while (!empty()) std::this_thread::yield();
        }

    private:
        Pool& pool_;
    };

    // Where one worker sleeps: nobody wakes those that a job does not ask for.
    struct Worker {
        std::mutex mutex;
        std::condition_variable woken;
        std::atomic<bool> sleeping{false};

        pthread_t thread{};  // guarded by mutex, as is
        Elsewhere elsewhere; // where it wakes

        template <typename F> void sleep_until(F ready) {
            std::unique_lock<std::mutex> lock(mutex);
            thread = pthread_self();
            sleeping = true;
            while (!ready()) {
                woken.wait(lock);
                elsewhere.arrive();
            }
            sleeping = false;
        }
        void wake() {
            if (!sleeping) return;
            {
                std::lock_guard<std::mutex> lock(mutex); // it was between its check and its wait, and has left that
                if (sleeping) elsewhere.send(thread);
            }
            woken.notify_one();
        }
    };

    void start_workers(int wanted) {
        workers_.reserve(static_cast<size_t>(std::max(wanted, 0))); // a thread that runs must be kept
        while (static_cast<int>(workers_.size()) < wanted) {
            auto worker = std::make_unique<Worker>();
            try {
                std::thread(&Pool::serve, this, worker.get(), static_cast<int>(workers_.size()), job_.load()).detach();
            } catch (const std::system_error&) {
                return; // the system gives no more threads: go on with those there are
            }
            workers_.push_back(std::move(worker));
        }
    }

    void serve(Worker* self, int index, uint64_t seen) {
        for (;;) {
            const auto wanted = [this, index, &seen] { return job_ != seen && index < helpers_; };
            if (!spin_until(wanted)) self->sleep_until(wanted);
            seen = job_;
            if (!enter()) continue;
            if (index < helpers_ && (ready_ == nullptr || ready_(context_))) work();
            --inside_;
        }
    }

    bool enter() {
        int64_t inside = inside_;
        while (inside >= 0)
            if (inside_.compare_exchange_weak(inside, inside + 1)) return true;
        return false;
    }

    void work() noexcept {
        const int64_t threads = helpers_ + 1;
        for (int64_t begin = next_; begin < n_;) {
            const int64_t pieces = (n_ - begin - 1) / grain_ + 1, taken = std::max(pieces / (2 * threads), int64_t(1));
            const int64_t end = taken < pieces ? begin + taken * grain_ : n_;
            if (!next_.compare_exchange_weak(begin, end)) continue;
            function_(context_, begin, end);
            begin = next_;
        }
    }

    std::mutex user_;
    std::vector<std::unique_ptr<Worker>> workers_; // guarded by user_

    // The job; written while closed, read by those inside.
    int64_t n_ = 0, grain_ = 1;
    RangeFunction function_ = nullptr;
    void* context_ = nullptr;
    ReadyFunction ready_ = nullptr;
    std::atomic<int64_t> next_{0};

    std::atomic<int64_t> inside_{-CLOSED}; // workers in the job; -CLOSED more when nobody may enter
    std::atomic<uint64_t> job_{0};
    std::atomic<int> helpers_{0}; // workers that the job asks for, the first ones
};

std::atomic<Pool*> current{nullptr};

// Never destroyed: at exit its threads sleep and the process ends without them. A forked child has none of the
// threads and perhaps a locked mutex, so it forgets the pool and makes its own.
Pool& pool() {
    static const int at_fork = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
    (void)at_fork;
    Pool* existing = current;
    if (existing != nullptr) return *existing;
    Pool* made = new Pool;
    if (current.compare_exchange_strong(existing, made)) return *made;
    delete made; // another thread was first; this one has no workers yet
    return *existing;
}

} // namespace

void parallel_ranges(int64_t n, int64_t grain, int threads, RangeFunction function, void* context,
                     ReadyFunction ready) {
    if (n <= 0) return;
    const int64_t pieces = (n - 1) / grain + 1;
    const int used = pieces < threads ? static_cast<int>(pieces) : threads;
    if (used > 1 && pool().run(n, grain, used, function, context, ready)) return;
    function(context, 0, n);
}

} // namespace anybit
