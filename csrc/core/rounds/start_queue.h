#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace meshcast {

// Jobs done one after the other, in the order in which they came, on a thread of their own. Jobs do not throw.
class StartQueue {
 public:
  StartQueue();
  ~StartQueue();  // as finish()
  StartQueue(const StartQueue&) = delete;
  StartQueue& operator=(const StartQueue&) = delete;

  void push(std::function<void()> job);

  // Returns when all jobs are done; there are no further ones. Not from one of them.
  void finish();

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all that is above
};

}  // namespace meshcast
