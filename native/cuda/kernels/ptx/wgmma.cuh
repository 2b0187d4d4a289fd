#pragma once

#include <cstdint>

namespace glint::cuda::ptx {

__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffffU) >> 4U); };
  return field(address) | field(leading_bytes) << 16U | field(stride_bytes) << 32U;
}

__device__ __forceinline__ uint64_t wgmma_descriptor_swizzle_128b(uint32_t address, uint32_t leading_bytes,
                                                                  uint32_t stride_bytes) {
  return wgmma_descriptor(address, leading_bytes, stride_bytes) | uint64_t{1} << 62U;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void pin_registers(float (&values)[kCount]) {
#pragma unroll
  for (int index = 0; index < kCount; ++index) asm volatile("" : "+f"(values[index])::"memory");
}

template <int kColumns>
struct WgmmaE4m3;

template <int kColumns>
struct WgmmaBf16;

template <>
struct WgmmaE4m3<8> {
  static __device__ __forceinline__ void mma_async(float (&r)[4], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3"
        "}, %4, %5, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaE4m3<16> {
  static __device__ __forceinline__ void mma_async(float (&r)[8], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaE4m3<32> {
  static __device__ __forceinline__ void mma_async(float (&r)[16], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaE4m3<64> {
  static __device__ __forceinline__ void mma_async(float (&r)[32], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]), "+f"(r[24]),
          "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaE4m3<96> {
  static __device__ __forceinline__ void mma_async(float (&r)[48], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47"
        "}, %48, %49, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]), "+f"(r[24]),
          "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31]), "+f"(r[32]),
          "+f"(r[33]), "+f"(r[34]), "+f"(r[35]), "+f"(r[36]), "+f"(r[37]), "+f"(r[38]), "+f"(r[39]), "+f"(r[40]),
          "+f"(r[41]), "+f"(r[42]), "+f"(r[43]), "+f"(r[44]), "+f"(r[45]), "+f"(r[46]), "+f"(r[47])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaE4m3<112> {
  static __device__ __forceinline__ void mma_async(float (&r)[56], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %58, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
        "}, %56, %57, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]), "+f"(r[24]),
          "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31]), "+f"(r[32]),
          "+f"(r[33]), "+f"(r[34]), "+f"(r[35]), "+f"(r[36]), "+f"(r[37]), "+f"(r[38]), "+f"(r[39]), "+f"(r[40]),
          "+f"(r[41]), "+f"(r[42]), "+f"(r[43]), "+f"(r[44]), "+f"(r[45]), "+f"(r[46]), "+f"(r[47]), "+f"(r[48]),
          "+f"(r[49]), "+f"(r[50]), "+f"(r[51]), "+f"(r[52]), "+f"(r[53]), "+f"(r[54]), "+f"(r[55])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaE4m3<128> {
  static __device__ __forceinline__ void mma_async(float (&r)[64], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, %64, %65, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]), "+f"(r[24]),
          "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31]), "+f"(r[32]),
          "+f"(r[33]), "+f"(r[34]), "+f"(r[35]), "+f"(r[36]), "+f"(r[37]), "+f"(r[38]), "+f"(r[39]), "+f"(r[40]),
          "+f"(r[41]), "+f"(r[42]), "+f"(r[43]), "+f"(r[44]), "+f"(r[45]), "+f"(r[46]), "+f"(r[47]), "+f"(r[48]),
          "+f"(r[49]), "+f"(r[50]), "+f"(r[51]), "+f"(r[52]), "+f"(r[53]), "+f"(r[54]), "+f"(r[55]), "+f"(r[56]),
          "+f"(r[57]), "+f"(r[58]), "+f"(r[59]), "+f"(r[60]), "+f"(r[61]), "+f"(r[62]), "+f"(r[63])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaBf16<8> {
  static __device__ __forceinline__ void mma_async(float (&r)[4], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, %4, %5, accumulates, 1, 1, 0, 0;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaBf16<16> {
  static __device__ __forceinline__ void mma_async(float (&r)[8], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, accumulates, 1, 1, 0, 0;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaBf16<32> {
  static __device__ __forceinline__ void mma_async(float (&r)[16], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, accumulates, 1, 1, 0, 0;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaBf16<64> {
  static __device__ __forceinline__ void mma_async(float (&r)[32], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, accumulates, 1, 1, 0, 0;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]), "+f"(r[24]),
          "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaBf16<96> {
  static __device__ __forceinline__ void mma_async(float (&r)[48], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47"
        "}, %48, %49, accumulates, 1, 1, 0, 0;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]), "+f"(r[24]),
          "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31]), "+f"(r[32]),
          "+f"(r[33]), "+f"(r[34]), "+f"(r[35]), "+f"(r[36]), "+f"(r[37]), "+f"(r[38]), "+f"(r[39]), "+f"(r[40]),
          "+f"(r[41]), "+f"(r[42]), "+f"(r[43]), "+f"(r[44]), "+f"(r[45]), "+f"(r[46]), "+f"(r[47])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaBf16<112> {
  static __device__ __forceinline__ void mma_async(float (&r)[56], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %58, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
        "}, %56, %57, accumulates, 1, 1, 0, 0;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]), "+f"(r[24]),
          "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31]), "+f"(r[32]),
          "+f"(r[33]), "+f"(r[34]), "+f"(r[35]), "+f"(r[36]), "+f"(r[37]), "+f"(r[38]), "+f"(r[39]), "+f"(r[40]),
          "+f"(r[41]), "+f"(r[42]), "+f"(r[43]), "+f"(r[44]), "+f"(r[45]), "+f"(r[46]), "+f"(r[47]), "+f"(r[48]),
          "+f"(r[49]), "+f"(r[50]), "+f"(r[51]), "+f"(r[52]), "+f"(r[53]), "+f"(r[54]), "+f"(r[55])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaBf16<128> {
  static __device__ __forceinline__ void mma_async(float (&r)[64], uint64_t left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, %64, %65, accumulates, 1, 1, 0, 0;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19]), "+f"(r[20]), "+f"(r[21]), "+f"(r[22]), "+f"(r[23]), "+f"(r[24]),
          "+f"(r[25]), "+f"(r[26]), "+f"(r[27]), "+f"(r[28]), "+f"(r[29]), "+f"(r[30]), "+f"(r[31]), "+f"(r[32]),
          "+f"(r[33]), "+f"(r[34]), "+f"(r[35]), "+f"(r[36]), "+f"(r[37]), "+f"(r[38]), "+f"(r[39]), "+f"(r[40]),
          "+f"(r[41]), "+f"(r[42]), "+f"(r[43]), "+f"(r[44]), "+f"(r[45]), "+f"(r[46]), "+f"(r[47]), "+f"(r[48]),
          "+f"(r[49]), "+f"(r[50]), "+f"(r[51]), "+f"(r[52]), "+f"(r[53]), "+f"(r[54]), "+f"(r[55]), "+f"(r[56]),
          "+f"(r[57]), "+f"(r[58]), "+f"(r[59]), "+f"(r[60]), "+f"(r[61]), "+f"(r[62]), "+f"(r[63])
        : "l"(left), "l"(right), "r"(accumulates));
  }
};

__device__ __forceinline__ void wgmma_m64n64k16_bf16(float (&r_sums)[32], const uint32_t (&r_left)[4], uint64_t right,
                                                     int accumulates) {
  asm volatile(
      "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, accumulates, 1, 1, 0;\n}\n"
      : "+f"(r_sums[0]), "+f"(r_sums[1]), "+f"(r_sums[2]), "+f"(r_sums[3]), "+f"(r_sums[4]), "+f"(r_sums[5]),
        "+f"(r_sums[6]), "+f"(r_sums[7]), "+f"(r_sums[8]), "+f"(r_sums[9]), "+f"(r_sums[10]), "+f"(r_sums[11]),
        "+f"(r_sums[12]), "+f"(r_sums[13]), "+f"(r_sums[14]), "+f"(r_sums[15]), "+f"(r_sums[16]), "+f"(r_sums[17]),
        "+f"(r_sums[18]), "+f"(r_sums[19]), "+f"(r_sums[20]), "+f"(r_sums[21]), "+f"(r_sums[22]), "+f"(r_sums[23]),
        "+f"(r_sums[24]), "+f"(r_sums[25]), "+f"(r_sums[26]), "+f"(r_sums[27]), "+f"(r_sums[28]), "+f"(r_sums[29]),
        "+f"(r_sums[30]), "+f"(r_sums[31])
      : "r"(r_left[0]), "r"(r_left[1]), "r"(r_left[2]), "r"(r_left[3]), "l"(right), "r"(accumulates));
}

__device__ __forceinline__ void wgmma_m64n128k16_trans_bf16(float (&r_sums)[64], const uint32_t (&r_left)[4],
                                                            uint64_t right, int accumulates) {
  asm volatile(
      "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63"
      "}, {%64, %65, %66, %67}, %68, accumulates, 1, 1, 1;\n}\n"
      : "+f"(r_sums[0]), "+f"(r_sums[1]), "+f"(r_sums[2]), "+f"(r_sums[3]), "+f"(r_sums[4]), "+f"(r_sums[5]),
        "+f"(r_sums[6]), "+f"(r_sums[7]), "+f"(r_sums[8]), "+f"(r_sums[9]), "+f"(r_sums[10]), "+f"(r_sums[11]),
        "+f"(r_sums[12]), "+f"(r_sums[13]), "+f"(r_sums[14]), "+f"(r_sums[15]), "+f"(r_sums[16]), "+f"(r_sums[17]),
        "+f"(r_sums[18]), "+f"(r_sums[19]), "+f"(r_sums[20]), "+f"(r_sums[21]), "+f"(r_sums[22]), "+f"(r_sums[23]),
        "+f"(r_sums[24]), "+f"(r_sums[25]), "+f"(r_sums[26]), "+f"(r_sums[27]), "+f"(r_sums[28]), "+f"(r_sums[29]),
        "+f"(r_sums[30]), "+f"(r_sums[31]), "+f"(r_sums[32]), "+f"(r_sums[33]), "+f"(r_sums[34]), "+f"(r_sums[35]),
        "+f"(r_sums[36]), "+f"(r_sums[37]), "+f"(r_sums[38]), "+f"(r_sums[39]), "+f"(r_sums[40]), "+f"(r_sums[41]),
        "+f"(r_sums[42]), "+f"(r_sums[43]), "+f"(r_sums[44]), "+f"(r_sums[45]), "+f"(r_sums[46]), "+f"(r_sums[47]),
        "+f"(r_sums[48]), "+f"(r_sums[49]), "+f"(r_sums[50]), "+f"(r_sums[51]), "+f"(r_sums[52]), "+f"(r_sums[53]),
        "+f"(r_sums[54]), "+f"(r_sums[55]), "+f"(r_sums[56]), "+f"(r_sums[57]), "+f"(r_sums[58]), "+f"(r_sums[59]),
        "+f"(r_sums[60]), "+f"(r_sums[61]), "+f"(r_sums[62]), "+f"(r_sums[63])
      : "r"(r_left[0]), "r"(r_left[1]), "r"(r_left[2]), "r"(r_left[3]), "l"(right), "r"(accumulates));
}

template <int kColumns>
struct WgmmaRegisterE4m3;

template <>
struct WgmmaRegisterE4m3<32> {
  static __device__ __forceinline__ void mma_async(float (&r)[16], const uint4& left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15])
        : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "l"(right), "r"(accumulates));
  }
};

template <>
struct WgmmaRegisterE4m3<40> {
  static __device__ __forceinline__ void mma_async(float (&r)[20], const uint4& left, uint64_t right, int accumulates) {
    asm volatile(
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %25, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n40k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
        "}, {%20, %21, %22, %23}, %24, accumulates, 1, 1;\n}\n"
        : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]), "+f"(r[6]), "+f"(r[7]), "+f"(r[8]),
          "+f"(r[9]), "+f"(r[10]), "+f"(r[11]), "+f"(r[12]), "+f"(r[13]), "+f"(r[14]), "+f"(r[15]), "+f"(r[16]),
          "+f"(r[17]), "+f"(r[18]), "+f"(r[19])
        : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "l"(right), "r"(accumulates));
  }
};

}
