// Entry point of the kernel. scripts/make_gather_ptx.py compiles it to csrc/src/gather_ptx.inc.
#include "gather.h"

extern "C" __global__ void __launch_bounds__(pycollect::gather::kThreads)
    pycollect_gather(const pycollect::gather::Parameters parameters) {
  pycollect::gather::gather(parameters, blockIdx.x, threadIdx.x);
}
