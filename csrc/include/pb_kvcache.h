/*
 * pb_kvcache: how many KV-cache positions each layer keeps, and which ones.
 *
 * This header includes every part of the public interface:
 *
 *   version.h    the library's version
 *   status.h     what a call answers: 0, or a pinned negative code
 *   allocator.h  where memory comes from
 *   budget.h     one layer's share of a pyramid
 *   plan.h       every layer's budget, the total kept exactly
 *   policy.h     the interface of every decode-time policy
 *   snapkv.h     SnapKV: score by recent attention, pooled over neighbours
 *   pyramidkv.h  PyramidKV: SnapKV at this layer's share
 *   baselines.h  simpler policies to compare with
 *   stack.h      a whole model's caches, one per layer
 *   select.h     prefill selection: which positions of a prompt each KV head keeps
 *   compact.h    move the kept rows of keys or values to the front
 *
 * Rules that hold everywhere:
 *
 *   - Arguments come in this order: the object; inputs and options, an array followed by its stride and lengths; the
 *     range of heads; the workspace and its size; last the outputs, an array followed by its stride and its capacity.
 *     What is changed in place stands first, as an object does. Sizes and strides count elements, but for those whose
 *     name or comment says bytes.
 *   - A call that answers an error has changed nothing: neither the object nor any output.
 *   - A caller's array is read or written during the call only. Outputs overlap no input.
 *   - Memory is allocated by `create` functions alone, through the caller's allocator. Nothing allocates later.
 *   - No threads are started, no globals written, nothing printed, no errno set. Objects that are not shared between
 *     threads need no lock. One object must not be used by two threads at once.
 *   - Same calls, same bits: on every compiler, optimisation level, instruction set and byte order. In another
 *     floating-point environment (flushed subnormals, another rounding mode) other positions may win, and nothing else
 *     changes: every output is written, and positions are distinct, ascending and in range.
 *
 * Usable from C11 and C++.
 */
#ifndef PB_KVCACHE_H
#define PB_KVCACHE_H

#include "pb_kvcache/version.h"
#include "pb_kvcache/status.h"
#include "pb_kvcache/allocator.h"
#include "pb_kvcache/budget.h"
#include "pb_kvcache/plan.h"
#include "pb_kvcache/policy.h"
#include "pb_kvcache/snapkv.h"
#include "pb_kvcache/pyramidkv.h"
#include "pb_kvcache/baselines.h"
#include "pb_kvcache/stack.h"
#include "pb_kvcache/select.h"
#include "pb_kvcache/compact.h"

#endif
