// A runtime's shared library, opened by name and never closed again: runtimes have threads and exit handlers of their
// own. Tables of functions are filled from it symbol by symbol.
#pragma once

#include "common.h"

#include <string>
#include <vector>

namespace apu::gpu {

class Library {
public:
  explicit Library(const char *advice) : advice_(advice) {} // "install ...", for errors
  // The first of `names` that is there, the plainest last; else APU_E_UNSUPPORTED, also where it cannot be loaded.
  apu_status open(const char *kind, const std::vector<std::string> &names);
  // Paths of libraries in this process whose names begin with `stem`, in the order in which they were loaded.
  static std::vector<std::string> loaded(const char *stem);
  static bool same_file(const std::string &path, const std::string &name); // by inode, or a name without a folder
  // Null where the library lacks it; required names are noted for `complete`.
  void *symbol(const char *name, bool required = true);
  void *find(const char *name) const; // in it or in what it is linked with; null where neither has it
  // APU_E_UNSUPPORTED naming the required symbols that were not found.
  apu_status complete(const char *kind) const;
  const std::string &path() const { return path_; }

private:
  const char *advice_;
  void *handle_ = nullptr;
  std::string path_; // of the file where known, else the name
  std::vector<std::string> missing_;
};

// Of a process that was forked after the runtime was opened: the child's copy of it is unusable.
class ForkCheck {
public:
  ForkCheck();
  apu_status check(const char *kind) const;

private:
  int pid_;
};

} // namespace apu::gpu
