// All public headers of the core. Not included are python_env.h, device_gather.h, and the headers
// of pycollect::ipc (shared_memory.h, shared_slab_pool.h). Headers in pycollect/detail/ are
// internal and may change with any version.
#pragma once

#include "pycollect/assemble.h"
#include "pycollect/batch.h"
#include "pycollect/collector.h"
#include "pycollect/collector_options.h"
#include "pycollect/copy.h"
#include "pycollect/cuda.h"
#include "pycollect/dlpack.h"
#include "pycollect/dtype.h"
#include "pycollect/env.h"
#include "pycollect/header.h"
#include "pycollect/key.h"
#include "pycollect/layout.h"
#include "pycollect/memory_pool.h"
#include "pycollect/multistep.h"
#include "pycollect/recorder.h"
#include "pycollect/recorder_options.h"
#include "pycollect/slab.h"
#include "pycollect/slab_pool.h"
#include "pycollect/split.h"
#include "pycollect/tensor_view.h"
#include "pycollect/thread_pool.h"
#include "pycollect/uploader.h"
#include "pycollect/version.h"
#include "pycollect/worker_error.h"
