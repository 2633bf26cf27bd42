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
 *   state.h      what a cache or stack holds and remembers, as bytes
 *   hold.h       caches whose rows lie in slots in any order
 *   select.h     prefill selection: which positions of a prompt each KV head keeps
 *   compact.h    move the kept rows of keys or values to the front
 *   merge.h      merge evicted rows of keys and values into kept ones
 *   blocks.h     whole blocks, for paged engines: which are kept, and which an eviction frees
 *
 * Rules that hold everywhere:
 *
 *   - Arguments come in this order:
 *       1. the object, or what is changed in place;
 *       2. inputs and options, an array followed by its stride and by how much it holds;
 *       3. the range of heads, first_head .. end_head - 1;
 *       4. the workspace and its size, or the allocator;
 *       5. outputs, an array followed by its stride and by how much it has room for.
 *     One function departs from it: in pb_kvcache_compact the range stands beside the rows that it is a range of.
 *   - Strides, lengths and capacities count elements, but for those whose comment says bytes.
 *   - A function's comment has a line for each argument but the object. It lists statuses by their ends:
 *     "PB_KVCACHE_ERROR_NULL, _CAPACITY".
 *   - A call that answers an error has changed nothing: neither the object nor any output. Only `layer` of a stack's
 *     checks is written, to say where the error is.
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
#include "pb_kvcache/divide.h"
#include "pb_kvcache/policy.h"
#include "pb_kvcache/snapkv.h"
#include "pb_kvcache/pyramidkv.h"
#include "pb_kvcache/baselines.h"
#include "pb_kvcache/stack.h"
#include "pb_kvcache/state.h"
#include "pb_kvcache/hold.h"
#include "pb_kvcache/select.h"
#include "pb_kvcache/attention.h"
#include "pb_kvcache/compact.h"
#include "pb_kvcache/merge.h"
#include "pb_kvcache/blocks.h"

#endif
