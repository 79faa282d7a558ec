// The shared part of the C ABI, with the guard that cffi could not parse.
#pragma once

#include <cstdint>

extern "C" {
#include "abi/common.h"
}

// Everything else in an object is hidden, so that two objects in one process never share state.
#define PF_EXPORT extern "C" __attribute__((visibility("default")))
