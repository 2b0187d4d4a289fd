#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace glint {

class PagePool {
 public:
  struct Match {
    int32_t page;
    uint64_t serial;
  };

  static constexpr uint64_t kSaltLimit = uint64_t{1} << 63;

  PagePool(int32_t num_pages, int32_t page_tokens, uint64_t hash_mask = ~uint64_t{0});

  [[nodiscard]] bool take(std::span<int32_t> out);
  void hold(int32_t page);
  void release(int32_t page, bool is_reusable = true);

  uint64_t root(uint64_t salt) const;
  std::optional<Match> find(uint64_t parent, std::span<const int32_t> tokens) const;
  uint64_t add(uint64_t parent, std::span<const int32_t> tokens, int32_t page);

  int32_t num_pages() const { return static_cast<int32_t>(pages_.size()); }
  int32_t page_tokens() const { return page_tokens_; }
  int64_t num_free() const { return free_.count; }
  int64_t num_cached() const { return int64_t{dead_.count} + cached_.count; }
  int64_t num_held() const { return num_held_; }
  int64_t available() const { return num_free() + num_cached(); }
  int32_t references(int32_t page) const;
  bool check(std::string* why) const;

 private:
  friend struct PagePoolTap;

  static constexpr int32_t kNoPage = -1;

  enum class State : uint8_t { free, held, dead, cached };

  struct Page {
    State state = State::free;
    bool is_reusable = false;
    int32_t references = 0;
    int32_t previous = kNoPage;
    int32_t next = kNoPage;
    int32_t chain_previous = kNoPage;
    int32_t chain_next = kNoPage;
    uint64_t serial = 0;
    uint64_t parent = 0;
    uint64_t hash = 0;
  };

  struct List {
    int32_t head = kNoPage;
    int32_t tail = kNoPage;
    int32_t count = 0;
  };

  void check_page(int32_t page) const;
  Page& item(int32_t page) { return pages_[static_cast<size_t>(page)]; }
  const Page& item(int32_t page) const { return pages_[static_cast<size_t>(page)]; }

  void append(List& list, int32_t page);
  void remove(List& list, int32_t page);
  List& list_of(State state);
  int32_t take_one();

  void check_key(uint64_t parent, std::span<const int32_t> tokens) const;
  uint64_t hash_key(uint64_t parent, std::span<const int32_t> tokens) const;
  size_t bucket_of(uint64_t hash) const { return hash & (buckets_.size() - 1); }
  std::optional<Match> find_hashed(uint64_t hash, uint64_t parent, std::span<const int32_t> tokens) const;
  std::span<const int32_t> tokens_of(int32_t page) const;
  bool same_key(const Page& stored, int32_t page, uint64_t parent, std::span<const int32_t> tokens) const;
  void link(int32_t page);
  void unregister(int32_t page);

  std::string list_problem(const List& list, State state) const;
  std::string page_problem(int32_t page) const;
  std::string chain_problem(size_t bucket, int64_t& seen) const;
  std::string twin_problem(int32_t page) const;
  std::string count_problem() const;
  std::string registration_problem(int64_t chained) const;
  std::string problem() const;

  int32_t page_tokens_;
  uint64_t hash_mask_;
  uint64_t hash_seed_;
  uint64_t next_serial_ = 1;
  int32_t num_held_ = 0;
  List free_;
  List dead_;
  List cached_;
  std::vector<Page> pages_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> buckets_;
};

}
