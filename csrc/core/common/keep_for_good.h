#pragma once

#include <memory>

namespace meshcast {

// Never frees this memory, which a GPU that does not answer may still touch.
void keep_for_good(std::shared_ptr<void> memory);

}  // namespace meshcast
