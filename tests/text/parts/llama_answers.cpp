// Reads answers with llama-server's own parsers. Standard input: a JSON list of {template: path, text, tools};
// standard output: a JSON list of {generation_prompt, thoughts, content, calls}, or {error}.
#include "chat.h"

#include <fstream>
#include <iostream>
#include <iterator>

static std::string text_of(std::istream & stream) {
    return { std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>() };
}

// Read one answer with the parser that tools/server/server-common.cpp would choose for a chat template.
static common_json read(const common_json & asked) {
    std::ifstream file(asked.at("template").get<std::string>());
    auto templates = common_chat_templates_init(nullptr, text_of(file), "<s>", "</s>");

    common_chat_templates_inputs inputs;
    common_chat_msg user;
    user.role = "user";
    user.content = "Go.";
    inputs.messages = { user };
    inputs.tools = common_chat_tools_parse_oaicompat(asked.at("tools"));
    inputs.parallel_tool_calls = true;
    inputs.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
    const common_chat_params applied = common_chat_templates_apply(templates.get(), inputs);

    common_chat_parser_params params(applied);
    params.reasoning_format = inputs.reasoning_format;
    if (!applied.parser.empty()) {
        params.parser.load(applied.parser);
    }
    common_json told = common_json::object();
    told["generation_prompt"] = applied.generation_prompt;
    try {
        const common_chat_msg found = common_chat_parse(asked.at("text").get<std::string>(), false, params);
        common_json calls = common_json::array();
        for (const auto & call : found.tool_calls) {
            common_json one = common_json::array();
            one.push_back(call.name);
            one.push_back(call.arguments);
            calls.push_back(one);
        }
        told["content"] = found.content;
        told["thoughts"] = found.reasoning_content;
        told["calls"] = calls;
    } catch (const std::exception & error) {
        told["error"] = std::string(error.what());
    }
    return told;
}

int main() {
    const common_json asked = common_json::parse(text_of(std::cin));
    common_json told = common_json::array();
    for (size_t idx = 0; idx < asked.size(); ++idx) {
        told.push_back(read(asked.at(idx)));
    }
    std::cout << told.dump_safe() << "\n";
}
