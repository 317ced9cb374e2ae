/* Allows a distribution's libjansson.a inside libdeepwell.so. The archive is compiled for programs (-fPIE), and a
 * shared library can contain such code only if it also contains every variable that the code uses. The only
 * exception is `stdin`: json_loadf compares its argument with it to name the source in error messages. With
 * --wrap=stdin the linker uses the variable below, which equals no open file. */
#include <jansson.h>
#include <stdio.h>

__attribute__((visibility("hidden"))) FILE *__wrap_stdin;
