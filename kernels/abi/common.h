/* The C ABI that every operation shares.
 *
 * Plain declarations only: cffi parses this file as it stands, and kernels include it between
 * `extern "C" {` and `}` after <stdint.h>.  An operation adds a fragment of its own (in its .cu, between
 * the lines `// pagefuzz-abi: begin` and `// pagefuzz-abi: end`): an args struct named pf_<operation>_args
 * and one launcher per schedule named pf_<operation>_<schedule>.
 *
 * Strides, extents and sizes ending in _bytes are bytes; every other count is a count of elements, rows,
 * tokens or pages.  A buffer's id in the checked build is the position of its pf_array in the args struct.
 */

#define PF_ABI_VERSION 1

enum pf_status {
  PF_OK = 0,
  PF_REFUSED = 1,       /* the arguments break the operation's contract; nothing was launched or counted */
  PF_LAUNCH_FAILED = 2, /* the CUDA runtime, or the host emulation in its place, refused the launch */
  PF_BARRIER_FAULT = 3  /* host emulation: a barrier that not every thread of the CTA reached */
};

enum pf_dtype {
  PF_U8 = 1, PF_U16 = 2, PF_U32 = 3, PF_U64 = 4, /* raw elements of 1, 2, 4 and 8 bytes */
  PF_I32 = 5, PF_I64 = 6,
  PF_F16 = 7, PF_BF16 = 8, PF_F32 = 9,
  PF_E4M3 = 10, PF_E5M2 = 11
};

typedef struct pf_array {
  void *data;           /* address of element 0; null if absent */
  int64_t extent_bytes; /* bytes from data that belong to the argument */
  int32_t dtype;        /* enum pf_dtype */
  int32_t rank;         /* number of dimensions the caller's tensor has */
} pf_array;

typedef struct pf_message {
  char text[512];       /* one clear sentence, always terminated; empty on PF_OK */
} pf_message;

/* ---- what the object at hand is -------------------------------------------------------------------- */

enum pf_build_flag {
  PF_BUILD_CUDA = 1,       /* compiled by nvcc; otherwise the host emulation */
  PF_BUILD_CHECKED = 2,    /* accesses and index arithmetic are tested and recorded */
  PF_BUILD_UBSAN = 4,      /* host: signed overflow of plain integers is recorded as an index fault */
  PF_BUILD_ASAN = 8,       /* host: compiled with AddressSanitizer */
  PF_BUILD_COVERAGE = 16,  /* host: compiled for gcov */
  PF_BUILD_INJECT = 32     /* faults can be injected */
};

int pf_abi_version(void);
int pf_build_flags(void);

/* ---- checked builds -------------------------------------------------------------------------------- */

typedef struct pf_interval {
  int64_t begin;        /* byte offset from the buffer's base, inclusive */
  int64_t end;          /* exclusive */
} pf_interval;

/* What a launch may touch of one buffer.  Intervals are sorted, disjoint and not adjacent.  On CUDA both
 * pointers are device addresses. */
typedef struct pf_permissions {
  const pf_interval *read;
  int64_t read_count;
  const pf_interval *write;
  int64_t write_count;
} pf_permissions;

typedef struct pf_site {
  char file[96];        /* base name of the source file */
  int32_t line;
  int32_t block[3];
  int32_t thread[3];
  int32_t reserved;
} pf_site;

enum pf_access_kind { PF_READ = 0, PF_WRITE = 1, PF_ATOMIC = 2 };

typedef struct pf_access_fault {
  int64_t sequence;     /* order among all faults of the launch, from 1; 0: no such fault */
  int64_t offset_bytes; /* of the access, from the buffer's base */
  int32_t size_bytes;   /* of the access */
  int32_t buffer;
  int32_t kind;         /* enum pf_access_kind */
  int32_t reserved;
  pf_site site;
} pf_access_fault;

enum pf_index_operation {
  PF_ADD = 0, PF_SUBTRACT = 1, PF_MULTIPLY = 2, PF_SHIFT_LEFT = 3, PF_NEGATE = 4, PF_DIVIDE = 5,
  PF_NARROW = 6         /* a conversion that loses bits; operand b is 0 */
};

typedef struct pf_index_fault {
  int64_t sequence;
  int64_t a, b;         /* operands, unsigned 64-bit ones as their bit pattern */
  int64_t result;       /* the wrapped result that execution goes on with */
  int32_t operation;    /* enum pf_index_operation */
  int32_t bits;         /* width of the result type */
  int32_t is_signed;
  int32_t reserved;
  pf_site site;
} pf_index_fault;

enum { PF_FAULTS_KEPT = 8 };

typedef struct pf_check_record {
  int64_t accesses;        /* loads, stores and atomics tested */
  int64_t accessed_bytes;
  int64_t operations;      /* index operations tested; in a UBSan build those that faulted */
  int64_t access_fault_count;
  int64_t index_fault_count;
  int32_t access_faults_kept;
  int32_t index_faults_kept;
  /* The first fault of each distinct (file, line, buffer, kind) or (file, line, operation), in order. */
  pf_access_fault access_faults[PF_FAULTS_KEPT];
  pf_index_fault index_faults[PF_FAULTS_KEPT];
} pf_check_record;

/* Installs the permissions of the next launch and clears the record.  buffer_count 0: nothing is permitted.
 * Not launchers: they may synchronise.  Without PF_BUILD_CHECKED (or, for the record, PF_BUILD_UBSAN) both
 * return PF_REFUSED. */
int pf_check_begin(const pf_permissions *permissions, int32_t buffer_count);
/* Waits for the launch, copies the record out. */
int pf_check_end(pf_check_record *record);

/* ---- builds with PF_BUILD_INJECT ------------------------------------------------------------------- */

typedef struct pf_injection {
  void *data;           /* base of the buffer */
  int64_t offset_bytes; /* from there */
  int32_t size_bytes;   /* 1, 2, 4 or 8; 0: no access */
  int32_t kind;         /* PF_READ, whose value is thrown away, or PF_WRITE */
  int32_t buffer;
  int32_t reserved;
} pf_injection;

/* Every kernel launched from now on is followed by one that makes this access, as if it were the kernel's
 * own.  Other builds return PF_REFUSED. */
int pf_inject(const pf_injection *injection);

/* ---- host emulation only --------------------------------------------------------------------------- */

enum pf_order {
  PF_ORDER_FORWARD = 0,
  PF_ORDER_REVERSE = 1,
  PF_ORDER_SHUFFLED = 2,
  PF_ORDER_WARP_INTERLEAVED = 3 /* lane 0 of every warp, then lane 1 of every warp, ... */
};

/* Order of CTAs and of threads inside each, for the launches that follow.  CUDA builds return PF_REFUSED. */
int pf_set_order(int32_t order, uint64_t seed);

typedef struct pf_fault {
  int64_t address;      /* that was accessed */
  int64_t instruction;  /* that accessed it, from the object's beginning */
  int32_t is_write;     /* 1 or 0; -1 where the processor does not tell; -2: neither the address */
  int32_t signal;       /* SIGSEGV, SIGBUS; 0: no fault so far */
} pf_fault;

/* From now on the first fault of memory protection is noted in *seen, which must outlive the process,
 * before it ends it.  The object must not be unloaded any more: the handler is in it, and its stack, on
 * which Python handles its own signals too.  AddressSanitizer notes faults itself: PF_REFUSED there, and
 * in CUDA builds. */
int pf_catch_faults(pf_fault *seen);

/* ---- CUDA only ------------------------------------------------------------------------------------- */

/* Marks which chunks of device memory [data, data + size_bytes) hold a byte other than `value`:
 * flags[i] = 1 (device memory, one byte a chunk) for chunk i of chunk_bytes (a multiple of 16).
 * Used to find what a launch touched in buffers of gigabytes.  Host builds return PF_REFUSED. */
int pf_scan(const void *data, int64_t size_bytes, int64_t chunk_bytes, int32_t value, uint8_t *flags,
            void *stream);

/* ---- coverage builds ------------------------------------------------------------------------------- */

/* Writes what gcov counted so far to the .gcda file beside the object, and goes on counting from zero.
 * A worker calls it before it ends.  Without PF_BUILD_COVERAGE: PF_REFUSED. */
int pf_coverage_dump(void);
