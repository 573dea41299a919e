// What csrc/torch adds to every op: the name in errors, warnings, threads, arguments as float32.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cfenv>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels/registry.h"
#include "torch/context.h"
#include "torch/named_op.h"

namespace w4a8::test {
namespace {

template <class Error>
int64_t fails(int64_t number) {
  if constexpr (std::is_default_constructible_v<Error>) {
    throw Error();
  } else {
    throw Error("the text of " + std::to_string(number));
  }
}
int64_t fails_in_torch(int64_t number) {
  TORCH_CHECK(false, "the text of ", number);
  return number;
}

// Whatever the core, the standard library or torch throws begins with the name of the operator.
TEST(TorchNamedOpTest, EveryException) {
  const auto message = [](int64_t (*call)(int64_t)) -> std::string {
    try {
      call(7);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return std::string("not a c10::Error: ") + error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(message(NamedOp<"some_op", fails<std::invalid_argument>>::call), "w4a8::some_op: the text of 7");
  EXPECT_EQ(message(NamedOp<"some_op", fails<std::length_error>>::call), "w4a8::some_op: the text of 7");
  EXPECT_EQ(message(NamedOp<"some_op", fails<std::logic_error>>::call), "w4a8::some_op: the text of 7");
  EXPECT_EQ(message(NamedOp<"some_op", fails<std::bad_alloc>>::call), "w4a8::some_op: out of memory");
  EXPECT_EQ(message(NamedOp<"some_op", fails_in_torch>::call), "w4a8::some_op: the text of 7");
}

// Each worker runs once, and on ATen's threads: as many as it has, whatever compiler this is.
TEST(TorchParallelTest, WorkersAreThreads) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    AtenParallel parallel;
    ASSERT_EQ(parallel.threads(), threads);
    for (const int workers : {1, 2, 3, 7}) {
      std::mutex mutex;
      std::multiset<int> ran;
      std::set<std::thread::id> ids;
      parallel.run(workers, [&](int worker) {
        const std::lock_guard lock(mutex);
        ran.insert(worker);
        ids.insert(std::this_thread::get_id());
      });
      for (int i = 0; i < workers; ++i) EXPECT_EQ(ran.count(i), 1u) << "worker " << i << " of " << workers;
      EXPECT_EQ(ran.size(), static_cast<std::size_t>(workers));
      EXPECT_EQ(ids.size(), static_cast<std::size_t>(std::min(workers, threads)));
      parallel.run(workers, [&](int) { EXPECT_TRUE(workers == 1 || threads == 1 || at::in_parallel_region()); });
    }
  }
  at::set_num_threads(before);
}

// Inside another parallel region (at::parallel_for opens none here: it is a pragma, and these tests have no OpenMP):
// the calling thread alone, for all workers.
TEST(TorchParallelTest, OneThreadInsideAnotherRegion) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  std::vector<int> threads(2), ran(2);
  AtenParallel().run(2, [&](int outer) {
    const auto i = static_cast<std::size_t>(outer);
    AtenParallel parallel;
    threads[i] = parallel.threads();
    parallel.run(3, [&](int) { ++ran[i]; });
  });
  at::set_num_threads(before);
  EXPECT_EQ(threads, (std::vector<int>{1, 1}));
  EXPECT_EQ(ran, (std::vector<int>{3, 3}));
}

// A kernel that gives other bits is turned off with one warning, which only csrc/torch prints.
TEST(TorchKernelTest, BrokenKernelWarnsOnce) {
  static const Kernel& scalar = *all_kernels().back();
  Kernel broken = scalar;
  broken.name = "broken";
  broken.gemm = [](const Rows& rows, int64_t m, const Panels& panels, int64_t count, float* out, int64_t ldc,
                   uint8_t* scratch) {
    scalar.gemm(rows, m, panels, count, out, ldc, scratch);
    out[0] += 1;
  };
  KernelChoice choice({&broken, &scalar});
  const auto printed = [](auto call) {
    testing::internal::CaptureStderr();
    call();
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(printed([&] { warn_of_kernels(choice); }), "");
  EXPECT_EQ(printed([&] { EXPECT_EQ(&choice.best(), &scalar); }), "") << "the core prints nothing";
  const std::string warning = printed([&] { warn_of_kernels(choice); });
  EXPECT_NE(
      warning.find("w4a8: kernel broken is turned off in this process, since it gave other products of rows [1, 130]"),
      std::string::npos)
      << warning;
  EXPECT_EQ(printed([&] { warn_of_kernels(choice); }), "");
  EXPECT_EQ(printed([] { op_kernel(); }), "") << "the kernels of this process are right";
}

TEST(TorchFloat32Test, FromFloat64InTheDefaultEnvironment) {
  const double third = 1.0 / 3;  // float32 of it is greater
  ASSERT_EQ(std::fesetround(FE_DOWNWARD), 0);
  const float number = to_float32(third);
  const at::Tensor tensor = to_float32(at::full({2, 3}, third, at::kDouble).t());
  const int mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(mode, FE_DOWNWARD) << "the caller's own setting is as it was";
  EXPECT_EQ(number, 0x1.555556p-2f);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({3, 2}));
  EXPECT_TRUE(tensor.is_contiguous() && tensor.scalar_type() == at::kFloat);
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(tensor.data_ptr<float>()[i], 0x1.555556p-2f);
}

}  // namespace
}  // namespace w4a8::test
