#include "faults.h"

#include <charconv>
#include <limits>
#include <string>

#include "settings.h"

namespace kvsim {
namespace {

/// Cuts `text` at the first `separator`; the part before it, and `text` becomes the part behind.
std::string_view cut(std::string_view* text, char separator) {
  const std::size_t at = text->find(separator);
  const std::string_view head = text->substr(0, at);
  *text = at == std::string_view::npos ? std::string_view() : text->substr(at + 1);
  return head;
}

bool parse_count(std::string_view text, std::uint64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && *value > 0;
}

/// "3", "5-7" or "5-".
bool parse_calls(std::string_view text, std::uint64_t* first, std::uint64_t* last) {
  const bool range = text.find('-') != std::string_view::npos;
  if (!parse_count(cut(&text, '-'), first)) return false;
  *last = range ? std::numeric_limits<std::uint64_t>::max() : *first;
  return text.empty() || (parse_count(text, last) && *last >= *first);
}

std::string plan_of_environment() {
  std::string plan = settings().fail;
  const auto add = [&](const std::string& rule) { plan += (plan.empty() ? "" : ",") + rule; };
  if (!settings().oom_at_create.empty()) {
    add("cuMemCreate:" + settings().oom_at_create + ":CUDA_ERROR_OUT_OF_MEMORY");
  }
  std::string_view not_ready = settings().not_ready;
  while (!not_ready.empty()) add(std::string(cut(&not_ready, ',')) + ":CUDA_ERROR_NOT_READY");
  return plan;
}

}  // namespace

FaultPlan& FaultPlan::instance() {
  static FaultPlan* const plan = [] {
    auto* made = new FaultPlan;
    const std::string text = plan_of_environment();
    if (!made->set(text)) complain("no fault plan: '" + text + "'; nothing will fail");
    return made;
  }();
  return *plan;
}

bool FaultPlan::parse(std::string_view text, std::vector<Rule>* rules) {
  while (!text.empty()) {
    std::string_view part = cut(&text, ',');
    const std::string_view name = cut(&part, ':');
    const std::string_view calls = cut(&part, ':');
    const std::optional<CUresult> result = result_named(part);
    Rule rule{function_named(name), 0, 0, result.value_or(CUDA_SUCCESS)};
    if ((!rule.function && name != "*") || !result) return false;
    if (!parse_calls(calls, &rule.first, &rule.last)) return false;
    rules->push_back(rule);
  }
  return true;
}

bool FaultPlan::set(std::string_view text) {
  std::vector<Rule> rules;
  if (!parse(text, &rules)) return false;
  const std::lock_guard lock(mutex_);
  rules_ = std::move(rules);
  calls_.fill(0);
  all_calls_ = 0;
  armed_.store(!rules_.empty(), std::memory_order_release);
  return true;
}

std::optional<CUresult> FaultPlan::next(Function function) {
  if (!armed_.load(std::memory_order_acquire)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const std::uint64_t own = ++calls_[static_cast<std::size_t>(function)];
  const std::uint64_t all = ++all_calls_;
  for (const Rule& rule : rules_) {
    if (rule.function && *rule.function != function) continue;
    const std::uint64_t n = rule.function ? own : all;
    if (n >= rule.first && n <= rule.last) return rule.result;
  }
  return std::nullopt;
}

}  // namespace kvsim
