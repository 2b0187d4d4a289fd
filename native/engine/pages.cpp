#include "engine/pages.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>

#include "base/rng.h"

namespace glint {

namespace {

std::string page_text(int32_t page) { return "page " + std::to_string(page); }

uint64_t fresh_seed() {
  std::random_device source;
  return (uint64_t{source()} << 32) | source();
}

}

PagePool::PagePool(int32_t num_pages, int32_t page_tokens, uint64_t hash_mask)
    : page_tokens_(page_tokens), hash_mask_(hash_mask), hash_seed_(fresh_seed()) {
  if (num_pages < 0) {
    throw std::invalid_argument("num_pages is " + std::to_string(num_pages) + "; it must be 0 or more");
  }
  if (page_tokens < 1) {
    throw std::invalid_argument("page_tokens is " + std::to_string(page_tokens) + "; it must be 1 or more");
  }
  const auto count = static_cast<size_t>(num_pages);
  pages_.resize(count);
  tokens_.resize(count * static_cast<size_t>(page_tokens));
  buckets_.resize(std::bit_ceil(std::max<size_t>(2 * count, 1)), kNoPage);
  for (int32_t page = 0; page < num_pages; ++page) append(free_, page);
}

void PagePool::check_page(int32_t page) const {
  if (page < 0 || page >= num_pages()) {
    throw std::out_of_range(page_text(page) + " does not exist; the pool has " + std::to_string(num_pages()) +
                            " pages, numbered from 0");
  }
}

int32_t PagePool::references(int32_t page) const {
  check_page(page);
  return item(page).references;
}

void PagePool::append(List& list, int32_t page) {
  item(page).previous = list.tail;
  item(page).next = kNoPage;
  (list.tail == kNoPage ? list.head : item(list.tail).next) = page;
  list.tail = page;
  ++list.count;
}

void PagePool::remove(List& list, int32_t page) {
  const Page& gone = item(page);
  (gone.previous == kNoPage ? list.head : item(gone.previous).next) = gone.next;
  (gone.next == kNoPage ? list.tail : item(gone.next).previous) = gone.previous;
  --list.count;
}

PagePool::List& PagePool::list_of(State state) {
  return state == State::free ? free_ : state == State::dead ? dead_ : cached_;
}

int32_t PagePool::take_one() {
  List& list = free_.count > 0 ? free_ : dead_.count > 0 ? dead_ : cached_;
  const int32_t page = list.head;
  remove(list, page);
  if (item(page).serial != 0) unregister(page);
  item(page).state = State::held;
  item(page).references = 1;
  ++num_held_;
  return page;
}

bool PagePool::take(std::span<int32_t> out) {
  if (out.size() > static_cast<size_t>(available())) return false;
  for (int32_t& page : out) page = take_one();
  return true;
}

void PagePool::hold(int32_t page) {
  check_page(page);
  Page& held = item(page);
  if (held.state == State::free) {
    throw std::logic_error(page_text(page) + " is free and cannot be held; take it first");
  }
  if (held.references == std::numeric_limits<int32_t>::max()) {
    throw std::logic_error(page_text(page) + " has as many references as can be counted; release some first");
  }
  if (held.state != State::held) {
    remove(list_of(held.state), page);
    held.state = State::held;
    ++num_held_;
  }
  ++held.references;
}

void PagePool::release(int32_t page, bool is_reusable) {
  check_page(page);
  Page& held = item(page);
  if (held.state != State::held) {
    throw std::logic_error(page_text(page) + " is not held and cannot be released; release a reference only once");
  }
  held.is_reusable = held.is_reusable || is_reusable;
  if (--held.references > 0) return;
  --num_held_;
  const State found = std::exchange(held.is_reusable, false) ? State::cached : State::dead;
  held.state = held.serial != 0 ? found : State::free;
  append(list_of(held.state), page);
}

uint64_t PagePool::root(uint64_t salt) const {
  if (salt >= kSaltLimit) {
    throw std::invalid_argument("the cache salt is " + std::to_string(salt) + "; it must be below 2^63");
  }
  return salt | kSaltLimit;
}

void PagePool::check_key(uint64_t parent, std::span<const int32_t> tokens) const {
  if (parent < kSaltLimit && (parent == 0 || parent >= next_serial_)) {
    throw std::invalid_argument("the parent " + std::to_string(parent) +
                                " was never given out; use a root or a serial from find or add");
  }
  if (tokens.size() != static_cast<size_t>(page_tokens_)) {
    throw std::invalid_argument("a prefix page has " + std::to_string(tokens.size()) + " tokens; it must have " +
                                std::to_string(page_tokens_));
  }
}

uint64_t PagePool::hash_key(uint64_t parent, std::span<const int32_t> tokens) const {
  uint64_t hash = mix_bits(hash_seed_ ^ parent);
  for (const int32_t token : tokens) hash = mix_bits(hash + static_cast<uint32_t>(token));
  return hash & hash_mask_;
}

std::span<const int32_t> PagePool::tokens_of(int32_t page) const {
  const auto width = static_cast<size_t>(page_tokens_);
  return {tokens_.data() + static_cast<size_t>(page) * width, width};
}

bool PagePool::same_key(const Page& stored, int32_t page, uint64_t parent, std::span<const int32_t> tokens) const {
  return stored.parent == parent && std::ranges::equal(tokens_of(page), tokens);
}

std::optional<PagePool::Match> PagePool::find_hashed(uint64_t hash, uint64_t parent,
                                                     std::span<const int32_t> tokens) const {
  for (int32_t page = buckets_[bucket_of(hash)]; page != kNoPage; page = item(page).chain_next) {
    if (item(page).hash == hash && same_key(item(page), page, parent, tokens)) {
      return Match{page, item(page).serial};
    }
  }
  return std::nullopt;
}

std::optional<PagePool::Match> PagePool::find(uint64_t parent, std::span<const int32_t> tokens) const {
  check_key(parent, tokens);
  return find_hashed(hash_key(parent, tokens), parent, tokens);
}

uint64_t PagePool::add(uint64_t parent, std::span<const int32_t> tokens, int32_t page) {
  check_key(parent, tokens);
  check_page(page);
  Page& added = item(page);
  if (added.state != State::held) {
    throw std::logic_error(page_text(page) + " is not held and cannot be registered; take or hold it first");
  }
  const uint64_t hash = hash_key(parent, tokens);
  if (const auto match = find_hashed(hash, parent, tokens)) return match->serial;
  if (added.serial != 0) {
    throw std::logic_error(page_text(page) + " is registered under another prefix; take a fresh page");
  }
  added.serial = next_serial_++;
  added.parent = parent;
  added.hash = hash;
  std::ranges::copy(tokens, tokens_.begin() + int64_t{page} * page_tokens_);
  link(page);
  return added.serial;
}

void PagePool::link(int32_t page) {
  int32_t& head = buckets_[bucket_of(item(page).hash)];
  item(page).chain_previous = kNoPage;
  item(page).chain_next = head;
  if (head != kNoPage) item(head).chain_previous = page;
  head = page;
}

void PagePool::unregister(int32_t page) {
  Page& gone = item(page);
  (gone.chain_previous == kNoPage ? buckets_[bucket_of(gone.hash)] : item(gone.chain_previous).chain_next) =
      gone.chain_next;
  if (gone.chain_next != kNoPage) item(gone.chain_next).chain_previous = gone.chain_previous;
  gone.chain_previous = kNoPage;
  gone.chain_next = kNoPage;
  gone.serial = 0;
}

std::string PagePool::list_problem(const List& list, State state) const {
  const std::string name = state == State::free   ? "the free list"
                           : state == State::dead ? "the dead list"
                                                  : "the cached list";
  int32_t previous = kNoPage;
  int32_t count = 0;
  for (int32_t page = list.head; page != kNoPage; page = item(page).next) {
    if (page < 0 || page >= num_pages()) {
      return name + " leads to " + page_text(page) + ", which does not exist";
    }
    if (item(page).state != state || item(page).previous != previous || count == num_pages()) {
      return name + " is damaged at " + page_text(page);
    }
    previous = page;
    ++count;
  }
  if (list.tail != previous || list.count != count) {
    return name + " has " + std::to_string(count) + " pages but says " + std::to_string(list.count);
  }
  return {};
}

std::string PagePool::page_problem(int32_t page) const {
  const Page& seen = item(page);
  if ((seen.state == State::held) != (seen.references > 0) || seen.references < 0) {
    return page_text(page) + " has " + std::to_string(seen.references) + " references, which its state forbids";
  }
  if (seen.serial >= next_serial_) {
    return page_text(page) + " has the serial " + std::to_string(seen.serial) + ", which was never given out";
  }
  const bool is_found = seen.state == State::dead || seen.state == State::cached;
  if ((seen.state == State::free && seen.serial != 0) || (is_found && seen.serial == 0)) {
    return page_text(page) + " has a registration that its state forbids";
  }
  if (seen.serial != 0 && seen.hash != hash_key(seen.parent, tokens_of(page))) {
    return page_text(page) + " is registered under a hash that is not the hash of its tokens";
  }
  return {};
}

std::string PagePool::twin_problem(int32_t page) const {
  const Page& stored = item(page);
  for (int32_t other = stored.chain_next; other != kNoPage; other = item(other).chain_next) {
    if (item(other).hash == stored.hash && same_key(item(other), other, stored.parent, tokens_of(page))) {
      return page_text(page) + " and " + page_text(other) + " are registered under the same prefix";
    }
  }
  return {};
}

std::string PagePool::chain_problem(size_t bucket, int64_t& seen) const {
  int32_t previous = kNoPage;
  for (int32_t page = buckets_[bucket]; page != kNoPage; page = item(page).chain_next) {
    if (page < 0 || page >= num_pages() || ++seen > num_pages()) {
      return "a hash chain leads to " + page_text(page) + ", where it cannot go";
    }
    if (item(page).serial == 0 || bucket_of(item(page).hash) != bucket || item(page).chain_previous != previous) {
      return "a hash chain is damaged at " + page_text(page);
    }
    previous = page;
  }
  for (int32_t page = buckets_[bucket]; page != kNoPage; page = item(page).chain_next) {
    if (std::string text = twin_problem(page); !text.empty()) return text;
  }
  return {};
}

std::string PagePool::registration_problem(int64_t chained) const {
  std::vector<uint64_t> serials;
  for (const Page& page : pages_) {
    if (page.serial != 0) serials.push_back(page.serial);
  }
  if (std::cmp_not_equal(serials.size(), chained)) {
    return std::to_string(serials.size()) + " pages are registered but the hash chains hold " + std::to_string(chained);
  }
  std::ranges::sort(serials);
  const auto twin = std::ranges::adjacent_find(serials);
  return twin == serials.end() ? std::string() : "two pages have the serial " + std::to_string(*twin);
}

std::string PagePool::count_problem() const {
  const auto held = std::ranges::count_if(pages_, [](const Page& page) { return page.state == State::held; });
  if (held == num_held_ && num_free() + num_held() + num_cached() == num_pages()) return {};
  return "free " + std::to_string(num_free()) + ", held " + std::to_string(num_held()) + " and cached " +
         std::to_string(num_cached()) + " do not make " + std::to_string(num_pages()) + " pages";
}

std::string PagePool::problem() const {
  std::string text = list_problem(free_, State::free);
  if (text.empty()) text = list_problem(dead_, State::dead);
  if (text.empty()) text = list_problem(cached_, State::cached);
  for (int32_t page = 0; text.empty() && page < num_pages(); ++page) text = page_problem(page);
  int64_t chained = 0;
  for (size_t bucket = 0; text.empty() && bucket < buckets_.size(); ++bucket) {
    text = chain_problem(bucket, chained);
  }
  if (text.empty()) text = registration_problem(chained);
  return text.empty() ? count_problem() : text;
}

bool PagePool::check(std::string* why) const {
  std::string text = problem();
  if (why != nullptr) *why = text;
  return text.empty();
}

}
