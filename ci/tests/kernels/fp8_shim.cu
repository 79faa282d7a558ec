// Calls the conversions of common/fp8.h on arrays, on the host.
#include "common/fp8.h"
#include "common/launch.h"
#include "common/object.h"

extern "C" {
// pagefuzz-abi: begin
void pf_decode(int is_e5m2, const uint8_t *codes, float *values, int64_t count);
void pf_encode(int is_e5m2, const float *values, uint8_t *codes, int64_t count);
void pf_quantise(int is_e5m2, const float *values, const float *scales, uint8_t *codes, int64_t count);
void pf_narrow(int is_bf16, const float *values, uint16_t *words, int64_t count);
void pf_widen(int is_bf16, const uint16_t *words, float *values, int64_t count);
// pagefuzz-abi: end
}

PF_EXPORT void pf_decode(int is_e5m2, const uint8_t* codes, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = is_e5m2 ? pf::E5M2::decode(codes[i]) : pf::E4M3::decode(codes[i]);
  }
}

PF_EXPORT void pf_encode(int is_e5m2, const float* values, uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = is_e5m2 ? pf::encode_fp8<pf::E5M2>(values[i]) : pf::encode_fp8<pf::E4M3>(values[i]);
  }
}

PF_EXPORT void pf_quantise(int is_e5m2, const float* values, const float* scales, uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = is_e5m2 ? pf::quantised_fp8<pf::E5M2>(values[i], scales[i])
                       : pf::quantised_fp8<pf::E4M3>(values[i], scales[i]);
  }
}

PF_EXPORT void pf_narrow(int is_bf16, const float* values, uint16_t* words, int64_t count) {
  for (int64_t i = 0; i < count; ++i) words[i] = is_bf16 ? pf::bf16_of(values[i]) : pf::fp16_of(values[i]);
}

PF_EXPORT void pf_widen(int is_bf16, const uint16_t* words, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = is_bf16 ? pf::fp32_of_bf16(words[i]) : pf::fp32_of_fp16(words[i]);
}
