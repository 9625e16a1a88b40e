/* A reshard by ScaLAPACK: p?gemr2d copies a matrix from one grid of processes to another. Times it and checks every
 * element.
 *
 *   scalapack_reshard PROBLEM REPEATS SLOW
 *
 * PROBLEM is text: rows and columns; then for source and target: rows and columns of the grid, rows and columns of a
 * block, and the ranks of the grid row by row. Every process has one block at most. See rounds.h.
 *
 * ScaLAPACK has columns in memory one after the other; our rows are its columns, so that (columns, rows) is the matrix
 * it sees.
 */
#include "rounds.h"

void Cblacs_get(int context, int what, int *value);
void Cblacs_gridmap(int *context, int *map, int leading, int rows, int columns);
void Cpigemr2d(int m, int n, int *a, int ia, int ja, int *a_description, int *b, int ib, int jb, int *b_description,
               int context);

typedef struct {
  int grid_rows, grid_columns, block_rows, block_columns;
  int context;                   /* -1 outside the grid */
  int row, column;               /* first element of this rank's block */
  int rows, columns;             /* its size; 0 where there is none */
  int description[9];
  int32_t *data;
} Side;

static int world, rows, columns, all;
static Side source, target;

static int least(int a, int b) { return a < b ? a : b; }

static void read_side(FILE *file, Side *side) {
  if (fscanf(file, "%d %d %d %d", &side->grid_rows, &side->grid_columns, &side->block_rows, &side->block_columns) != 4)
    fail("a grid ends early");
  /* The grid that ScaLAPACK sees is ours with rows and columns exchanged; its map has columns one after the other. */
  int *map = malloc(sizeof(int) * (size_t)(side->grid_rows * side->grid_columns));
  side->rows = side->columns = 0;
  for (int i = 0; i < side->grid_rows; ++i) {
    for (int j = 0; j < side->grid_columns; ++j) {
      int *at = &map[i * side->grid_columns + j];
      if (fscanf(file, "%d", at) != 1) fail("the ranks of a grid end early");
      if (*at != rank) continue;
      side->row = i * side->block_rows;
      side->column = j * side->block_columns;
      side->rows = least(side->block_rows, rows - side->row);
      side->columns = least(side->block_columns, columns - side->column);
    }
  }
  Cblacs_get(0, 0, &side->context);
  Cblacs_gridmap(&side->context, map, side->grid_columns, side->grid_columns, side->grid_rows);
  free(map);
  const int local = side->columns > 0 ? side->columns : 1;
  const int description[9] = {1, side->context, columns, rows, side->block_columns, side->block_rows, 0, 0, local};
  memcpy(side->description, description, sizeof description);
  side->data = malloc(sizeof(int32_t) * ((size_t)side->rows * (size_t)side->columns + 1));
}

/* Fills (salt >= 0) or checks the block; returns the number of wrong elements. */
static int64_t visit(Side *side, int32_t salt, int check) {
  int64_t wrong = 0;
  for (int i = 0; i < side->rows; ++i) {
    for (int j = 0; j < side->columns; ++j) {
      const uint64_t index = (uint64_t)(side->row + i) * (uint64_t)columns + (uint64_t)(side->column + j);
      const int32_t value = (int32_t)(uint32_t)(index + (uint64_t)salt);
      int32_t *at = &side->data[(size_t)i * (size_t)side->columns + (size_t)j];
      if (check)
        wrong += *at != value;
      else
        *at = value;
    }
  }
  return wrong;
}

static void move(void) {
  Cpigemr2d(columns, rows, source.data, 1, 1, source.description, target.data, 1, 1, target.description, all);
}

static void fill(int32_t salt) {
  visit(&source, salt, 0);
  memset(target.data, 0xFF, sizeof(int32_t) * (size_t)target.rows * (size_t)target.columns);
}

static int64_t wrong(int32_t salt) { return visit(&target, salt, 1); }

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (argc != 4) fail("usage: scalapack_reshard PROBLEM REPEATS SLOW");
  FILE *file = fopen(argv[1], "r");
  if (!file || fscanf(file, "%d %d", &rows, &columns) != 2) fail("cannot read the problem");
  read_side(file, &source);
  read_side(file, &target);
  fclose(file);
  int *everybody = malloc(sizeof(int) * (size_t)world);
  for (int i = 0; i < world; ++i) everybody[i] = i;
  Cblacs_get(0, 0, &all);
  Cblacs_gridmap(&all, everybody, 1, 1, world);

  rounds(atoi(argv[2]), atof(argv[3]));
  MPI_Finalize();
  return 0;
}
