// Numbers that are zero at first, for the launch behind this one, which may begin meanwhile and then waits (`launch_before`).
#include "hopper.cuh"

struct Args {
  int* to;
  int n;
};

extern "C" __global__ void __launch_bounds__(THREADS) zeros(const __grid_constant__ Args a) {
  next_launch();
  for (int j = 0; j < EACH; j++) {
    const int i = (blockIdx.x * EACH + j) * THREADS + threadIdx.x;
    if (i < a.n) a.to[i] = 0;
  }
}
