#pragma once

#include <memory>

namespace meshcast {

// For memory that a GPU which does not answer may still touch: it is never given back.
void keep_for_good(std::shared_ptr<void> memory);

}  // namespace meshcast
