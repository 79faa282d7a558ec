// Sentences for pf_message. `{}` stands for the next argument: an integer or a C string.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/abi.h"

namespace pf {

using Name = const char*;  // of an argument, in a sentence

class Sentence {
 public:
  explicit Sentence(pf_message* message) : message_(message) {
    if (message_ != nullptr) message_->text[0] = '\0';
  }

  template <class... Arguments>
  void write(const char* format, Arguments... arguments) {
    (put_until_hole(format, arguments), ...);
    put(format);
  }

 private:
  template <class Argument>
  void put_until_hole(const char*& format, Argument argument) {
    const char* hole = std::strstr(format, "{}");
    if (hole == nullptr) return;
    for (; format != hole; ++format) put(*format);
    format = hole + 2;
    if constexpr (std::is_integral_v<Argument>) {
      put_integer(argument);
    } else {
      put(static_cast<const char*>(argument));
    }
  }

  template <class Integer>
  void put_integer(Integer value) {
    // Digits from the magnitude as unsigned: the most negative value has no positive counterpart.
    auto magnitude = static_cast<uint64_t>(value);
    if constexpr (std::is_signed_v<Integer>) {
      if (value < 0) {
        put('-');
        magnitude = 0 - magnitude;
      }
    }
    char digits[20];
    int count = 0;
    do {
      digits[count++] = static_cast<char>('0' + magnitude % 10);
      magnitude /= 10;
    } while (magnitude != 0);
    while (count > 0) put(digits[--count]);
  }

  void put(const char* text) {
    for (; *text != '\0'; ++text) put(*text);
  }

  void put(char letter) {
    if (message_ == nullptr || length_ + 1 >= sizeof(message_->text)) return;
    message_->text[length_++] = letter;
    message_->text[length_] = '\0';
  }

  pf_message* message_;
  size_t length_ = 0;
};

template <class... Arguments>
void say(pf_message* message, const char* format, Arguments... arguments) {
  Sentence(message).write(format, arguments...);
}

}  // namespace pf
