import { expect, it } from 'vitest';
import schema from '../../schema/plugin.json';
import { read } from '../src/lab/settings.js';
import { DEFAULTS } from './environment.js';

it('reads each setting of the schema', () => {
  for (const [key, property] of Object.entries(schema.properties)) {
    const other = {
      number: (property.default as number) + 0.5,
      boolean: !property.default,
    }[property.type];
    expect(read({ ...DEFAULTS, [key]: other }), key).not.toEqual(read(DEFAULTS));
  }
});
