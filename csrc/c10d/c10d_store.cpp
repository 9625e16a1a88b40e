#include "c10d/c10d_store.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace meshcast {
namespace {

class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override {
    return store_->compareSet(key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t count) override { return store_->add(key, count); }
  void erase(const std::string& key) override { store_->deleteKey(key); }
  std::optional<std::vector<std::string>> read(const std::vector<std::string>& keys) override {
    if (!store_->check(keys)) return std::nullopt;
    std::vector<std::vector<uint8_t>> values;
    if (store_->hasExtendedApi()) {
      values = store_->multiGet(keys);
    } else {
      for (const std::string& key : keys) values.push_back(store_->get(key));
    }
    std::vector<std::string> out;
    out.reserve(values.size());
    for (const auto& value : values) out.emplace_back(value.begin(), value.end());
    return out;
  }
  const void* connection() const override {
    auto* prefix = dynamic_cast<c10d::PrefixStore*>(store_.get());
    return prefix ? prefix->getUnderlyingNonPrefixStore().get() : store_.get();
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

std::shared_ptr<Store> store_of(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_shared<C10dStore>(std::move(store));
}

}  // namespace meshcast
