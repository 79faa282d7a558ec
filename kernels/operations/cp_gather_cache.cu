// (a) cp_gather_cache: raw copy of cache entries through a block table.

#include <cstdint>

extern "C" {
#include "abi/common.h"
// pagefuzz-abi: begin

typedef struct pf_cp_gather_cache_args {
  int64_t struct_bytes;      /* sizeof(pf_cp_gather_cache_args) */
  pf_array src;              /* [num_pages, page_size_tokens, entry]: rank 3, elements of element_bytes */
  pf_array dst;              /* [dst_rows, entry]: rank 2, dtype as src */
  pf_array block_table;      /* [num_requests, table_width] int32: rank 2 */
  pf_array starts;           /* [num_requests (+ 1 with has_terminal)] int32: rank 1 */
  pf_array seq_starts;       /* [num_requests] int32, optional: rank 1 */
  pf_array counts;           /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_requests;
  int64_t num_tokens;        /* rows the launch may write */
  int64_t page_size_tokens;
  int64_t num_pages;
  int64_t table_width;
  int64_t table_row_stride;  /* elements */
  int64_t page_stride_bytes;
  int64_t slot_stride_bytes;
  int64_t dst_rows;
  int64_t dst_row_stride_bytes;
  int64_t entry_bytes;
  int64_t element_bytes;     /* 1, 2, 4 or 8 */
  int64_t has_terminal;      /* 0 or 1: starts[num_requests] is readable and ends the last request */
  void *stream;
} pf_cp_gather_cache_args;

/* schedule: page
 * contains: yes
 * summary: one logical page at a time, table looked up once a page, wide copies
 */
int pf_cp_gather_cache_page(const pf_cp_gather_cache_args *args, pf_message *message);

/* schedule: token
 * contains: yes
 * summary: requests x splits, tokens walked serially, element by element
 */
int pf_cp_gather_cache_token(const pf_cp_gather_cache_args *args, pf_message *message);

/* schedule: page-as-merged
 * contains: yes
 * faults: no table-width guard, page ids unchecked, row * entry_bytes in int32 (reported faults 1 and 3)
 * summary: the page schedule as first published, to reproduce the faults reported against it
 */
int pf_cp_gather_cache_page_as_merged(const pf_cp_gather_cache_args *args, pf_message *message);

// pagefuzz-abi: end
}
