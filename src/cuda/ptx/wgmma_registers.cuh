// The accumulator registers of a wgmma of any width, as inline assembly asks for them: one name and
// one operand each. wgmma.cuh and wgmma_e4m3.cuh define their overloads with these.
#pragma once

// clang-format off
#define DROPLESS_WGMMA_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DROPLESS_WGMMA_NAMES_48 \
  DROPLESS_WGMMA_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DROPLESS_WGMMA_NAMES_64 \
  DROPLESS_WGMMA_NAMES_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DROPLESS_WGMMA_NAMES_96 \
  DROPLESS_WGMMA_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DROPLESS_WGMMA_NAMES_128 \
  DROPLESS_WGMMA_NAMES_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define DROPLESS_WGMMA_4_VALUES(d, i) \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define DROPLESS_WGMMA_16_VALUES(d, i) \
  DROPLESS_WGMMA_4_VALUES(d, i), DROPLESS_WGMMA_4_VALUES(d, (i) + 4), \
  DROPLESS_WGMMA_4_VALUES(d, (i) + 8), DROPLESS_WGMMA_4_VALUES(d, (i) + 12)
#define DROPLESS_WGMMA_VALUES_32(d) \
  DROPLESS_WGMMA_16_VALUES(d, 0), \
  DROPLESS_WGMMA_16_VALUES(d, 16)
#define DROPLESS_WGMMA_VALUES_48(d) \
  DROPLESS_WGMMA_VALUES_32(d), \
  DROPLESS_WGMMA_16_VALUES(d, 32)
#define DROPLESS_WGMMA_VALUES_64(d) \
  DROPLESS_WGMMA_VALUES_48(d), \
  DROPLESS_WGMMA_16_VALUES(d, 48)
#define DROPLESS_WGMMA_VALUES_96(d) \
  DROPLESS_WGMMA_VALUES_64(d), \
  DROPLESS_WGMMA_16_VALUES(d, 64), \
  DROPLESS_WGMMA_16_VALUES(d, 80)
#define DROPLESS_WGMMA_VALUES_128(d) \
  DROPLESS_WGMMA_VALUES_96(d), \
  DROPLESS_WGMMA_16_VALUES(d, 96), \
  DROPLESS_WGMMA_16_VALUES(d, 112)
// clang-format on
