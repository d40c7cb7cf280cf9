// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"
#include "kascade/plan.h"
#include "plan/npy.h"

namespace kascade {

Plan import_npy(const std::string& path, const std::vector<int>& anchors) {
  // Resolved first: a name without anchors is the caller's mistake, whatever the file holds.
  const std::vector<int> chosen = anchors.empty() ? anchors_from_name(path) : anchors;
  const MappedFile file(path);
  return plan_from_npy(file.bytes(), chosen, path);
}

}  // namespace kascade
