# SPDX-License-Identifier: Apache-2.0
# kascade_embed(TARGET NAME FILE): the bytes of FILE become `extern const unsigned char NAME[]` and `NAME_size` in
# namespace kascade::embedded of TARGET. Run as a script (cmake -P) this file writes the C++ source itself.
if(CMAKE_SCRIPT_MODE_FILE)
  file(READ ${KASCADE_EMBED_INPUT} hex HEX)
  # 16 bytes a line, so that the source stays readable for tools.
  string(REGEX REPLACE "(................................)" "\\1\n" lines "${hex}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${lines}")
  file(WRITE ${KASCADE_EMBED_OUTPUT} "#include <cstddef>
namespace kascade::embedded {
extern const unsigned char ${KASCADE_EMBED_NAME}[];
extern const std::size_t ${KASCADE_EMBED_NAME}_size;
const unsigned char ${KASCADE_EMBED_NAME}[] = {
${bytes}};
const std::size_t ${KASCADE_EMBED_NAME}_size = sizeof(${KASCADE_EMBED_NAME});
}  // namespace kascade::embedded
")
  return()
endif()

set(KASCADE_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_FILE})
function(kascade_embed target name file)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/embedded/${name}.cc)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DKASCADE_EMBED_INPUT=${file} -DKASCADE_EMBED_OUTPUT=${output} -DKASCADE_EMBED_NAME=${name}
            -P ${KASCADE_EMBED_SCRIPT}
    DEPENDS ${file} ${KASCADE_EMBED_SCRIPT}
    COMMENT "Embedding ${name}"
    VERBATIM)
  target_sources(${target} PRIVATE ${output})
endfunction()
