// For benchmarks and tests: holds a stream.

// Nothing, until the CPU says go or the time is up: what is queued behind it is queued ahead of time.
extern "C" __global__ void hisparse_hold(const volatile int* go, unsigned long long most_ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (*go == 0 && now - start < most_ns);
}
