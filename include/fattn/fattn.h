/* fattn/fattn.h - everything but fixture.h and checkpoint.h (HDF5, libfattn_fixture) and dlpack.h (opt-in). */
#ifndef FATTN_FATTN_H
#define FATTN_FATTN_H

#include <fattn/attention.h>
#include <fattn/base.h>
#include <fattn/check.h>
#include <fattn/comm.h>
#include <fattn/context.h>
#include <fattn/context_parallel.h>
#include <fattn/fp8.h>
#include <fattn/graph.h>
#include <fattn/kv_cache.h>
#include <fattn/optim.h>
#include <fattn/overlap.h>
#include <fattn/parallel.h>
#include <fattn/sample.h>
#include <fattn/tape.h>
#include <fattn/tensor.h>

#endif
