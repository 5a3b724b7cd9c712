// Keeps the calls of a thread, so that they can be made again together. Each function of the library
// that computes does so through `RunCall`.

#pragma once

#include <functional>
#include <vector>

using Recording = std::vector<std::function<void()>>;

inline thread_local Recording *recording = nullptr;  // null: this thread does not record

template <class Call>
void RunCall(Call call) {
  if (recording) recording->push_back(call);
  call();
}
