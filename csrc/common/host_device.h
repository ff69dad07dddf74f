// GS_HOST_DEVICE marks functions that host and device share, in files that both compile.
#pragma once

#ifdef __CUDACC__
#define GS_HOST_DEVICE __host__ __device__
#else
#define GS_HOST_DEVICE
#endif
