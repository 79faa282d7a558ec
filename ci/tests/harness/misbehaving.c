/* A host object behind the ABI of cp_gather_cache that does nothing, or misbehaves as the number of
 * pages says.  It tests the harness, not a kernel. */

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi/common.h"
#include "fragment.h"

int pf_abi_version(void) {
#ifdef WRONG_ABI
  return 99;
#else
  return PF_ABI_VERSION;
#endif
}
int pf_build_flags(void) { return 0; }
int pf_check_begin(const pf_permissions *permissions, int32_t buffer_count) {
  (void)permissions, (void)buffer_count;
  return PF_REFUSED;
}
int pf_check_end(pf_check_record *record) {
  (void)record;
  return PF_REFUSED;
}
int pf_coverage_dump(void) { return PF_REFUSED; }
int pf_set_order(int32_t order, uint64_t seed) {
  (void)order, (void)seed;
  return PF_OK;
}
int pf_scan(const void *data, int64_t size_bytes, int64_t chunk_bytes, int32_t value,
            uint8_t *flags, void *stream) {
  (void)stream;
  if (value < 0 || value > 255) return PF_REFUSED;
  for (int64_t at = 0; at < size_bytes; ++at)
    if (((const uint8_t *)data)[at] != value) flags[at / chunk_bytes] = 1;
  return PF_OK;
}

static volatile int64_t spun;

static int64_t overflow(int64_t depth) {
  volatile int64_t frame[512];
  frame[depth % 512] = depth;
  return overflow(depth + 1) + frame[(depth + 1) % 512];
}

/* Lines of 64 bytes, 64 KiB at a time. */
static void print_noise(int count) {
  char noise[1 << 16];
  for (size_t at = 0; at < sizeof noise; ++at) noise[at] = at % 64 == 63 ? '\n' : 'x';
  while (count--)
    if (write(1, noise, sizeof noise) < 0) abort();
}

static void *stays(void *nothing) {
  for (;;) pause();
  return nothing;
}

static void *ends(void *nothing) { return nothing; }

static char *late;

static void *writes_late(void *nothing) {
  usleep(20000);
  *late ^= 1;
  return nothing;
}

static pthread_t start(void *(*work)(void *)) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, work, NULL)) abort();
  return thread;
}

static void swallow(int number) { (void)number; }

enum { PAGE = 4096 };

static char *page_of(void *data) { return (char *)((uintptr_t)data / PAGE * PAGE); }

int pf_cp_gather_cache_page(const pf_cp_gather_cache_args *args, pf_message *message) {
  message->text[0] = 0;
  switch (args->num_pages) {
    case 101: *(volatile int *)8 = 1; break;
    case 102: abort();
    case 103: exit(3);
    case 104: for (;;) pause();
    case 105:
      for (int line = 0; line < 1000; ++line) fprintf(stderr, "noise %d\n", line);
      fprintf(stderr, "the last words\n");
      raise(SIGBUS);
      break;
    case 106: exit(0);
    case 107: puts("printed to stdout"); break;
    case 108: return 77;
    case 109: strcpy(message->text, "not to my taste"); return PF_REFUSED;
    case 110: raise(SIGKILL); break;
    case 111: for (int file = 3; file < 64; ++file) close(file); break;
    case 112: ((char *)args->dst.data)[-1] ^= 1; break;
    case 113: usleep(1500000); break;
    case 114: for (;;) spun = spun + 1;
    case 115: raise(SIGSTOP); break;
    case 116:
    case 117:
      if (fork() == 0)
        for (;;) pause();
      if (args->num_pages == 116) raise(SIGSEGV);
      break;
    case 118:
      while (malloc((size_t)1 << 30)) continue;
      abort();
    case 119: overflow(0); break;
    case 120:
      strcpy(message->text,
             "misaligned address: read of 16 bytes at byte 8 of buffer 0, cp_gather_cache.cu:88, "
             "block (1,0,0) thread (2,0,0)");
      return PF_LAUNCH_FAILED;
    case 121: raise(SIGFPE); break;
    case 122: raise(SIGTERM); break;
    case 123: usleep(20000000); break;
    case 124: for (;;) print_noise(1);
    case 125:
      fprintf(stderr, "first line\n==1==ERROR: AddressSanitizer: made-up on address 0x1\n");
      print_noise(1 << 10); /* 64 MiB */
      fprintf(stderr, "the last words\n");
      raise(SIGBUS);
      break;
    case 126:
      print_noise(1 << 14); /* a gibibyte */
      fprintf(stderr, "the last words\n");
      raise(SIGBUS);
      break;
    case 127: start(stays); break;
    case 128:
      late = (char *)args->dst.data - 1;
      start(writes_late);
      break;
    case 129: signal(SIGSEGV, swallow); break;
    case 130: /* joined: it has ended */
      pthread_join(start(ends), NULL);
      break;
    case 131: mprotect(page_of(args->src.data) - PAGE, PAGE, PROT_READ); break;
    case 132: mprotect(page_of(args->src.data), PAGE, PROT_READ | PROT_WRITE); break;
    case 133: fesetround(FE_UPWARD); break;
    case 134: (void)!fork(); break;
  }
  return PF_OK;
}

/* Says every field it was given, as the C compiler sees them. */
int pf_cp_gather_cache_token(const pf_cp_gather_cache_args *args, pf_message *message) {
  const pf_array *arrays[] = {&args->src,    &args->dst,        &args->block_table,
                              &args->starts, &args->seq_starts, &args->counts};
  const int64_t sizes[] = {
      args->num_requests,      args->num_tokens,        args->page_size_tokens, args->num_pages,
      args->table_width,       args->table_row_stride,  args->page_stride_bytes,
      args->slot_stride_bytes, args->dst_rows,          args->dst_row_stride_bytes,
      args->entry_bytes,       args->element_bytes,     args->has_terminal};
  char *at = message->text;
  at += sprintf(at, "%d", args->struct_bytes == (int64_t)sizeof *args);
  for (int i = 0; i < 6; ++i)
    at += sprintf(at, " %lld,%lld,%d,%d", (long long)(intptr_t)arrays[i]->data,
                  (long long)arrays[i]->extent_bytes, arrays[i]->dtype, arrays[i]->rank);
  for (int i = 0; i < 13; ++i) at += sprintf(at, " %lld", (long long)sizes[i]);
  sprintf(at, " %lld", (long long)(intptr_t)args->stream);
  return PF_LAUNCH_FAILED;
}
