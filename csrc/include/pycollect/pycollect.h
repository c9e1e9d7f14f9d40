// All of pycollect's public headers. What lies in pycollect/detail/ is the core's own, and may
// change with any version.
#pragma once

#include "pycollect/assemble.h"
#include "pycollect/copy.h"
#include "pycollect/cuda.h"
#include "pycollect/device_gather.h"
#include "pycollect/dtype.h"
#include "pycollect/header.h"
#include "pycollect/layout.h"
#include "pycollect/memory_pool.h"
#include "pycollect/multistep.h"
#include "pycollect/recorder.h"
#include "pycollect/shared_memory.h"
#include "pycollect/shared_slab_pool.h"
#include "pycollect/slab.h"
#include "pycollect/slab_pool.h"
#include "pycollect/split.h"
#include "pycollect/tensor_view.h"
#include "pycollect/thread_pool.h"
#include "pycollect/uploader.h"
#include "pycollect/version.h"
