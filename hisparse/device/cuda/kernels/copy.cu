// Whole pages, all layers, from one allocation to another: a list of pages in the launch's parameters.
//
// From the host to GPU blocks, and between GPU blocks. Beside attention the copy engine moves pages to
// the host: stores of a kernel to host memory back up in front of those to device memory (docs/cuda.md
// has the figures); this one does so only where the driver has no batched copy.
//
// A page's piece of a layer is contiguous at both ends; layers are strides apart. Ids are turned into
// byte offsets by the caller: everything here is 64-bit.
#ifdef __CUDACC_RTC__
typedef unsigned int uint32_t;
#else
#include <cstdint>
#endif

constexpr int PAGES_MAX = 252;  // what 4096 bytes of parameters hold
constexpr int AT_ONCE = 4;      // 16-byte chunks that a thread has on their way

struct Pages {
  unsigned long long source, target;                // addresses
  unsigned long long source_stride, target_stride;  // bytes from layer to layer
  uint32_t chunks;                                  // 16-byte chunks of a page in one layer
  uint32_t layers, pages, unused;
  ulonglong2 offset[PAGES_MAX];  // bytes of each page from `source` and from `target`, in layer 0
};
static_assert(sizeof(Pages) <= 4096, "more than a launch takes");

__device__ __forceinline__ uint4 load_once(const uint4* at) {
  uint4 v;  // read once, kept in no cache
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// A warp takes 2 KB at a time, layer after layer, so that what is on its way at a time lies in one
// layer's part of the host pool.
extern "C" __global__ void __launch_bounds__(256) hisparse_copy(const __grid_constant__ Pages p) {
  constexpr uint32_t STEP = 32 * AT_ONCE;
  const uint32_t steps = (p.chunks + STEP - 1) / STEP, warps = gridDim.x * (blockDim.x / 32);
  const uint32_t total = steps * p.pages * p.layers;
  for (uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) / 32; at < total; at += warps) {
    const uint32_t piece = at / steps, layer = piece / p.pages, page = piece - layer * p.pages;
    const uint32_t chunk = (at - piece * steps) * STEP + threadIdx.x % 32;
    const ulonglong2 offset = p.offset[page];
    const uint4* from = (const uint4*)(p.source + offset.x + layer * p.source_stride) + chunk;
    uint4* to = (uint4*)(p.target + offset.y + layer * p.target_stride) + chunk;
    uint4 held[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (chunk + 32 * i < p.chunks) held[i] = load_once(from + 32 * i);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (chunk + 32 * i < p.chunks) to[32 * i] = held[i];
  }
}
