#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "group/store.h"

namespace meshcast {

// torch's store for the protocols of a group.
std::shared_ptr<Store> store_of(c10::intrusive_ptr<c10d::Store> store);

}  // namespace meshcast
